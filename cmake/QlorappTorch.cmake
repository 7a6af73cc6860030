# Target qlorapp_torch: the headers and libraries of an installed torch, imported directly.
#
# Not find_package(Torch): that one stops where a CUDA build of torch meets a machine without a CUDA toolkit, and it
# overrides CMAKE_CUDA_ARCHITECTURES. -DTORCH_ROOT=<folder with include/ and lib/> wins; else the Python interpreter is asked.
set(TORCH_ROOT "" CACHE PATH "torch's folder (with include/ and lib/); empty: ask the Python interpreter")
find_package(Python 3.10 COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module QUIET)
set(qlorapp_torch_root "${TORCH_ROOT}")
if(NOT qlorapp_torch_root)
  if(NOT Python_Interpreter_FOUND)
    message(FATAL_ERROR "qlorapp needs torch, and there is no Python >= 3.10 to ask for it. Pass -DTORCH_ROOT=<folder of torch>, or "
                        "-DPython_EXECUTABLE=<python that has torch>.")
  endif()
  execute_process(COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
    OUTPUT_VARIABLE qlorapp_torch_root)
  if(NOT qlorapp_torch_root AND SKBUILD)
    message(FATAL_ERROR "qlorapp needs torch, and pip builds in an environment of its own, which has none. Add --no-build-isolation:\n"
                        "  pip install --no-build-isolation .\n"
                        "It uses what is installed: pip install torch==2.11.0 scikit-build-core cmake ninja")
  elseif(NOT qlorapp_torch_root)
    message(FATAL_ERROR "qlorapp needs torch, and ${Python_EXECUTABLE} has none. Pass -DPython_EXECUTABLE=<python that has torch>, or "
                        "-DTORCH_ROOT=<folder of torch>, which that python prints:\n"
                        "  python -c \"import torch; print(torch.__path__[0])\"\n"
                        "If there is none yet: pip install torch==2.11.0")
  endif()
endif()
if(NOT EXISTS "${qlorapp_torch_root}/include/torch/library.h")
  message(FATAL_ERROR "qlorapp needs torch with its C++ headers (include/torch/library.h); '${qlorapp_torch_root}' has none. "
                      "Pass -DTORCH_ROOT=<folder of torch>: the PyPI wheel has them (pip install torch==2.11.0).")
endif()

file(STRINGS "${qlorapp_torch_root}/include/torch/headeronly/version.h" _version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
if(NOT _version_lines)
  file(STRINGS "${qlorapp_torch_root}/include/torch/csrc/api/include/torch/version.h" _version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
endif()
string(REGEX REPLACE ".*TORCH_VERSION_MAJOR ([0-9]+).*" "\\1" _major "${_version_lines}")
string(REGEX REPLACE ".*TORCH_VERSION_MINOR ([0-9]+).*" "\\1" _minor "${_version_lines}")
set(QLORAPP_TORCH_VERSION "${_major}.${_minor}")
if(QLORAPP_TORCH_VERSION VERSION_LESS 2.8)
  message(FATAL_ERROR "qlorapp needs torch 2.8 or newer; ${qlorapp_torch_root} is ${QLORAPP_TORCH_VERSION}. pip install torch==2.11.0")
endif()
message(STATUS "torch ${QLORAPP_TORCH_VERSION} at ${qlorapp_torch_root}")

add_library(qlorapp_torch INTERFACE)
target_include_directories(qlorapp_torch SYSTEM INTERFACE
  $<BUILD_INTERFACE:${qlorapp_torch_root}/include> $<BUILD_INTERFACE:${qlorapp_torch_root}/include/torch/csrc/api/include>)
set(_libraries "")
foreach(_name torch torch_cpu c10)
  find_library(QLORAPP_LIB_${_name} ${_name} PATHS ${qlorapp_torch_root}/lib NO_DEFAULT_PATH REQUIRED)
  list(APPEND _libraries ${QLORAPP_LIB_${_name}})
endforeach()
find_library(QLORAPP_LIB_torch_python torch_python PATHS ${qlorapp_torch_root}/lib NO_DEFAULT_PATH)
# A compiler without a shared libstdc++ (it prints the bare name) would put a second one into the library, and the first exception
# that meets torch's would end the process.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so OUTPUT_VARIABLE _runtime ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT _runtime MATCHES "/")
  message(FATAL_ERROR "qlorapp needs a compiler with a shared libstdc++, as torch's exceptions pass through it; ${CMAKE_CXX_COMPILER} has a "
                      "static one only. Use another, in a fresh build folder (this one keeps its compiler):\n"
                      "  cmake --fresh -DCMAKE_CXX_COMPILER=/usr/bin/g++ -S ${CMAKE_SOURCE_DIR} -B ${CMAKE_BINARY_DIR}")
endif()
if(NOT _runtime MATCHES "/")
  set(_runtime stdc++)
endif()
# libstdc++ comes first: libtorch exports a std::filesystem of its own, from an older one, and the loader takes the first it meets.
# By its path, because a folder of LIBRARY_PATH may have a static one, which -lstdc++ would find before.
target_link_libraries(qlorapp_torch INTERFACE $<BUILD_INTERFACE:${_runtime}>)

# qlorapp_needed_libraries(target library …): links them even if the program itself uses no symbol of them. libqlorapp.so does, and the
# loader finds torch by the program's path alone: the installed libqlorapp.so names no folder of torch.
function(qlorapp_needed_libraries target)
  list(JOIN ARGN "\",\"" _group)
  target_link_libraries(${target} INTERFACE "$<BUILD_INTERFACE:-Wl,--push-state,--no-as-needed,\"${_group}\",--pop-state>")
  target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:${ARGN}>)  # once more as files, from which CMake forms that path
endfunction()
qlorapp_needed_libraries(qlorapp_torch ${_libraries})
