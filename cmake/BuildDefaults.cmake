# Settings that every target of ours shares. Nothing here leaks into a project that adds us as a subdirectory.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "qlorapp needs g++ 11 or newer (C++20); ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_VERSION}. Use a newer one:\n"
                      "  CXX=g++-11 cmake -S ${CMAKE_SOURCE_DIR} -B ${CMAKE_BINARY_DIR}")
endif()
find_program(QLORAPP_CCACHE ccache)
if(PROJECT_IS_TOP_LEVEL AND QLORAPP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The sloppiness is what ccache documents for precompiled headers; the base directory lets two checkouts share a cache.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${QLORAPP_CCACHE})
endif()

# Torch's headers take longer to compile than most of our files, so files of one target are compiled together, eight at a time.
option(QLORAPP_UNITY "Compile sources in batches; OFF compiles each alone, which is faster after a change to one" ON)
function(qlorapp_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${QLORAPP_UNITY} UNITY_BUILD_BATCH_SIZE 8)
endfunction()

# Bindings, command and layers without hot loops are compiled at a lower level than kernels, which takes 8 to 30 % less time per file.
# Below 2 only with a precompiled header of its own: g++ 13 refuses that of the layers at -O1.
function(qlorapp_optimize target level)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O${level}>)
endfunction()

# Language level, flags and the public headers, for everything that we compile.
add_library(qlorapp_defaults INTERFACE)
target_compile_features(qlorapp_defaults INTERFACE cxx_std_20)
target_include_directories(qlorapp_defaults INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
# No -ffast-math, ever: it flips denormals for the whole process and makes isnan() lie. -ffp-contract=off keeps
# a*b+c at two roundings, which is what every reference we are bit-compared with does.
# -fopenmp-simd lets a loop say `#pragma omp simd`, which vectorizes reductions; it brings neither threads nor a library.
target_compile_options(qlorapp_defaults INTERFACE -ffp-contract=off -fno-math-errno -fopenmp-simd)
