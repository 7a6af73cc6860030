# Header-only third parties, found by path so that packages, a plain folder (QLORAPP_DEPS_DIR) and torch's own copy all do.
function(qlorapp_headers target header hint)
  cmake_parse_arguments(arg "" "" "SUFFIXES" ${ARGN})
  string(MAKE_C_IDENTIFIER "QLORAPP_${target}_INCLUDE" variable)
  find_path(${variable} ${header} HINTS ${QLORAPP_DEPS_DIR} PATH_SUFFIXES ${arg_SUFFIXES})
  if(NOT ${variable})
    message(FATAL_ERROR "qlorapp needs <${header}>: apt-get install ${hint}, or pass -DQLORAPP_DEPS_DIR=<folder that holds it>.")
  endif()
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE $<BUILD_INTERFACE:${${variable}}>)
endfunction()

qlorapp_headers(qlorapp_nlohmann nlohmann/json.hpp nlohmann-json3-dev)

# fmt is torch's own copy, seen through a folder that shows nothing else of torch: torch-free layers format messages, too.
if(NOT EXISTS "${qlorapp_torch_root}/include/fmt/base.h")
  message(FATAL_ERROR "qlorapp needs fmt's headers, which torch 2.8 and newer brings; ${qlorapp_torch_root}/include/fmt has no base.h. "
                      "Install torch from PyPI: pip install torch==2.11.0")
endif()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/fmt)
file(CREATE_LINK "${qlorapp_torch_root}/include/fmt" ${PROJECT_BINARY_DIR}/fmt/fmt SYMBOLIC)
add_library(qlorapp_fmt INTERFACE)
target_include_directories(qlorapp_fmt SYSTEM INTERFACE $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/fmt>)
target_compile_definitions(qlorapp_fmt INTERFACE FMT_HEADER_ONLY)

# For what is compiled with the private headers, which stand beside their sources: "ops/norm.hpp" is src/ops/norm.hpp.
add_library(qlorapp_inside INTERFACE)
target_include_directories(qlorapp_inside INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
target_link_libraries(qlorapp_inside INTERFACE qlorapp_defaults qlorapp_fmt)

if(QLORAPP_BUILD_CLI)
  qlorapp_headers(qlorapp_cli11 CLI/CLI.hpp libcli11-dev)
endif()
if(QLORAPP_BUILD_TESTS)
  qlorapp_headers(qlorapp_eigen Eigen/Core libeigen3-dev SUFFIXES eigen3)
  # Catch2 v3 comes as a library, v2 as one header; tests/catch.hpp hides the difference.
  find_package(Catch2 QUIET)
  add_library(qlorapp_catch2 INTERFACE)
  if(Catch2_FOUND AND Catch2_VERSION VERSION_GREATER_EQUAL 3)
    target_link_libraries(qlorapp_catch2 INTERFACE Catch2::Catch2)
  else()
    find_path(QLORAPP_CATCH2_INCLUDE catch2/catch.hpp HINTS ${QLORAPP_DEPS_DIR})
    if(NOT QLORAPP_CATCH2_INCLUDE)
      message(FATAL_ERROR "qlorapp's tests need Catch2: apt-get install catch2, or configure with -DQLORAPP_BUILD_TESTS=OFF.")
    endif()
    target_include_directories(qlorapp_catch2 SYSTEM INTERFACE ${QLORAPP_CATCH2_INCLUDE})
  endif()
endif()
