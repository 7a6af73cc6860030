# qlorapp_warnings(target): strict on our own code; third-party headers come in as SYSTEM and stay silent.
function(qlorapp_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wnon-virtual-dtor -Wold-style-cast
                                           -Woverloaded-virtual -Wnull-dereference)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False positives of g++ 11–13 in inlined std::vector and std::string code.
    target_compile_options(${target} PRIVATE -Wno-null-dereference -Wno-array-bounds -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-restrict)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)  # takes a reference into one argument for one into another
      target_compile_options(${target} PRIVATE -Wno-dangling-reference)
    endif()
  endif()
  if(QLORAPP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
