# find_package(shoal): the target shoal::shoal.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/shoalTargets.cmake")
