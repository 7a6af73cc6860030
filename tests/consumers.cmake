# Programs outside the house, built as their authors would build them. Their folders are kept, so that a second run builds nothing.
set(_consumers ${PROJECT_BINARY_DIR}/consumers)
set(_prefix ${_consumers}/prefix)
set(_settings -DPython_EXECUTABLE=${Python_EXECUTABLE} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} -DTORCH_ROOT=${TORCH_ROOT})

add_test(NAME consumer.install COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${_prefix})
set_tests_properties(consumer.install PROPERTIES FIXTURES_SETUP installed LABELS consumer)

function(qlorapp_consumer name)
  add_test(NAME consumer.${name} COMMAND ${CMAKE_CTEST_COMMAND}
    --build-and-test ${CMAKE_CURRENT_SOURCE_DIR}/consumer_${name} ${_consumers}/${name}
    --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM} --build-noclean
    --build-options ${_settings} ${ARGN} --test-command ${_consumers}/${name}/consumer)
  set_tests_properties(consumer.${name} PROPERTIES LABELS consumer RESOURCE_LOCK consumers TIMEOUT 3000)
endfunction()

qlorapp_consumer(find_package -DCMAKE_PREFIX_PATH=${_prefix} -DCMAKE_BUILD_TYPE=Release)
set_tests_properties(consumer.find_package PROPERTIES FIXTURES_REQUIRED installed)
# Without optimization: this asks whether it builds and runs as a guest, not how fast.
qlorapp_consumer(subdirectory -DQLORAPP_SOURCE_DIR=${PROJECT_SOURCE_DIR} -DCMAKE_BUILD_TYPE=None -DQLORAPP_CUDA=OFF -DQLORAPP_DEPS_DIR=${QLORAPP_DEPS_DIR})
if(QLORAPP_CCACHE)
  set_tests_properties(consumer.subdirectory PROPERTIES ENVIRONMENT
    "CMAKE_CXX_COMPILER_LAUNCHER=${QLORAPP_CCACHE};CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime;CCACHE_BASEDIR=${PROJECT_SOURCE_DIR};CCACHE_NOHASHDIR=1")
endif()

if(QLORAPP_BUILD_PYTHON)
  set(_command "")
  if(TARGET qlorapp_cli)
    set(_command --command)
  endif()
  add_test(NAME consumer.wheel COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/consumer_wheel.py ${_consumers}/wheel ${_command})
  set_tests_properties(consumer.wheel PROPERTIES LABELS consumer SKIP_RETURN_CODE 77 RESOURCE_LOCK consumers TIMEOUT 1800 COST 500
    ENVIRONMENT "CXX=${CMAKE_CXX_COMPILER}")  # the same name, or ccache takes it for another compiler
endif()
