# qlorapp_layer(name SOURCES … USES … [TORCH] [UNITY]): one room of the house as an object library that links only downwards.
#
# A layer without TORCH cannot see torch's headers at all. The objects end up in ONE shared library (operators register
# themselves by static initializers, which a static archive would drop); tests of torch-free layers link the objects alone.
set_property(GLOBAL PROPERTY QLORAPP_LAYERS "")

# torch as our own code is compiled and linked; users of the library link qlorapp_torch, which has no flags.
# at::parallel_for is a template: without -fopenmp, ours would silently run on one thread. src/ops/cpu/rows.hpp refuses that.
# Our libraries and programs link although torch's own libraries miss something that a machine without a GPU does not have.
add_library(qlorapp_own_torch INTERFACE)
target_link_libraries(qlorapp_own_torch INTERFACE qlorapp_torch)
target_compile_options(qlorapp_own_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(qlorapp_own_torch INTERFACE -fopenmp "LINKER:-rpath-link,${qlorapp_torch_root}/lib" "LINKER:--allow-shlib-undefined")

# UNITY: its files are compiled in batches, so no two of them may give a private name two meanings.
function(qlorapp_layer name)
  cmake_parse_arguments(arg "TORCH;UNITY" "" "SOURCES;USES" ${ARGN})
  set(target qlorapp_${name})
  add_library(${target} OBJECT ${arg_SOURCES})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(arg_UNITY)
    qlorapp_unity(${target})
  endif()
  target_link_libraries(${target} PUBLIC qlorapp_inside)
  foreach(used ${arg_USES})
    target_link_libraries(${target} PUBLIC qlorapp_${used})
  endforeach()
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC qlorapp_own_torch)
    # One precompiled header for all torch layers; header tests compile without it.
    if(TARGET qlorapp_pch)
      target_precompile_headers(${target} REUSE_FROM qlorapp_pch)
    else()
      file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/pch.cpp CONTENT "")  # unlike WRITE, leaves an equal file alone
      add_library(qlorapp_pch OBJECT ${PROJECT_BINARY_DIR}/pch.cpp)
      set_target_properties(qlorapp_pch PROPERTIES POSITION_INDEPENDENT_CODE ON)
      target_link_libraries(qlorapp_pch PUBLIC qlorapp_inside qlorapp_own_torch)
      qlorapp_warnings(qlorapp_pch)
      target_precompile_headers(qlorapp_pch PRIVATE <ATen/ATen.h> <torch/library.h> <torch/csrc/autograd/custom_function.h>)
      target_precompile_headers(${target} REUSE_FROM qlorapp_pch)
    endif()
  endif()
  qlorapp_warnings(${target})
  set_property(GLOBAL APPEND PROPERTY QLORAPP_LAYERS ${target})
endfunction()

# The one library that users link: qlorapp::qlorapp.
function(qlorapp_shared_library)
  get_property(layers GLOBAL PROPERTY QLORAPP_LAYERS)
  add_library(qlorapp SHARED)
  add_library(qlorapp::qlorapp ALIAS qlorapp)
  target_link_libraries(qlorapp PRIVATE ${layers})
  # Not exported: the installed package finds torch where it is used (cmake/qlorappConfig.cmake.in).
  target_link_libraries(qlorapp PUBLIC $<BUILD_INTERFACE:qlorapp_torch>)
  target_compile_features(qlorapp PUBLIC cxx_std_20)
  target_include_directories(qlorapp PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(qlorapp PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None  # cmake/Cuda.cmake names the runtime
    BUILD_RPATH "${qlorapp_torch_root}/lib" INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
endfunction()
