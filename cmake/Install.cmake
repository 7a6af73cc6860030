# Install rules and the package config: find_package(qlorapp) gives qlorapp::qlorapp. Relocatable: torch is found again where
# the package is used (QlorappTorch.cmake travels along), so no path of this machine is written into the package.
#
# A wheel is the same tree under site-packages/qlorapp: lib/, include/, bin/ beside the Python files.
include(CMakePackageConfigHelpers)
set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/qlorapp)

if(SKBUILD)
  # A wheel keeps no links, so the library has one name; torch is its neighbor in site-packages.
  set_property(TARGET qlorapp PROPERTY VERSION)
  set_property(TARGET qlorapp PROPERTY SOVERSION)
  set_property(TARGET qlorapp PROPERTY INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
  install(TARGETS _C LIBRARY DESTINATION .)
  install(FILES ${PROJECT_BINARY_DIR}/python/qlorapp/_build_info.py DESTINATION .)
endif()

install(TARGETS qlorapp EXPORT qlorappTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET qlorapp_cli)
  set_target_properties(qlorapp_cli PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN/../../torch/lib;$<$<NOT:$<BOOL:${SKBUILD}>>:${qlorapp_torch_root}/lib>")
  install(TARGETS qlorapp_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/qlorapp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT qlorappTargets NAMESPACE qlorapp:: DESTINATION ${_package})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/qlorappConfig.cmake.in ${PROJECT_BINARY_DIR}/qlorappConfig.cmake
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/qlorappConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qlorappConfig.cmake ${PROJECT_BINARY_DIR}/qlorappConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/QlorappTorch.cmake DESTINATION ${_package})
