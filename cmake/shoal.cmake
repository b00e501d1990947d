# The naming rules of the tree, in one place.
#
#   shoal_layer(base SOURCES error.cpp ... TESTS base_test.cpp DEPS ...)   a folder of shoal/
#   shoal_op(rms_norm DEPS ...)                                            a folder of shoal/ops/
#
# Each becomes a static library shoal_<name>; the library `shoal` is made of all their objects.

# Flags of every target of ours. Contraction of a*b+c is off: where a fused operation is wanted it is written, so that every
# tile shape of a kernel rounds alike.
add_library(shoal_flags INTERFACE)
target_include_directories(shoal_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(shoal_flags INTERFACE -Wall -Wextra -Wpedantic $<$<CXX_COMPILER_ID:GNU>:-Wshadow=local> -Wconversion -Wno-sign-conversion
  -ffp-contract=off -fno-math-errno -fvisibility-inlines-hidden)
if(SHOAL_WERROR)
  # GCC's warnings from the optimiser depend on what it inlines and cry wolf over std::string (its bug 105651): they are
  # shown, they do not end a build.
  target_compile_options(shoal_flags INTERFACE -Werror $<$<CXX_COMPILER_ID:GNU>:-Wno-error=array-bounds -Wno-error=maybe-uninitialized
    -Wno-error=restrict -Wno-error=stringop-overflow -Wno-error=stringop-overread -Wno-error=free-nonheap-object>)
endif()
target_link_libraries(shoal_flags INTERFACE Threads::Threads)

# CUDA sources have flags of their own: products are fused where the kernels say so, otherwise by the compiler.
add_library(shoal_cuda_flags INTERFACE)
target_include_directories(shoal_cuda_flags INTERFACE ${PROJECT_SOURCE_DIR})
if(SHOAL_CUDA)
  target_compile_definitions(shoal_flags INTERFACE SHOAL_HAVE_CUDA=1)
  target_compile_definitions(shoal_cuda_flags INTERFACE SHOAL_HAVE_CUDA=1)
  target_compile_options(shoal_cuda_flags INTERFACE --expt-relaxed-constexpr --extended-lambda -Xcompiler=-Wall
    $<$<BOOL:${SHOAL_WERROR}>:-Werror=all-warnings>)
endif()

set(SHOAL_ISAS scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(SHOAL_ISAS scalar avx2 avx512)
  target_compile_definitions(shoal_flags INTERFACE SHOAL_HAVE_X86_ISAS=1)
endif()
# The scalar variant runs where nothing better does, and most of it would be autovectorised for SSE2 at great length:
# matmul_nbits took 39 s at -O3, 12 s at -O2.
set(SHOAL_FLAGS_scalar $<$<CONFIG:Release>:-O2>)
set(SHOAL_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SHOAL_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC's own AVX-512 header reads undefined vectors on purpose and warns about it (bug 105593); the same sources are
  # checked by the other two builds.
  list(APPEND SHOAL_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

set_property(GLOBAL PROPERTY SHOAL_LIBRARIES "")

# Headers that most sources read, parsed once per set of flags: a third of a clean build. Not with ccache, which would not
# cache such objects, nor with sanitizers and fuzzers: those builds find an include that a source forgot.
set(SHOAL_HEADERS <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <limits> <memory> <optional> <span> <string>
  <string_view> <vector> "${PROJECT_SOURCE_DIR}/shoal/base/error.h" "${PROJECT_SOURCE_DIR}/shoal/tensor/tensor.h")
function(shoal_parse_headers name)
  if(SHOAL_PRECOMPILE)
    file(WRITE ${CMAKE_BINARY_DIR}/headers.cpp "")
    add_library(headers_${name} OBJECT ${CMAKE_BINARY_DIR}/headers.cpp)
    target_compile_options(headers_${name} PRIVATE ${SHOAL_FLAGS_${name}})
    target_link_libraries(headers_${name} PRIVATE shoal_flags)
    target_precompile_headers(headers_${name} PRIVATE ${SHOAL_HEADERS} ${ARGN})
  endif()
endfunction()
function(shoal_use_headers target name)
  if(SHOAL_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM headers_${name})
  endif()
endfunction()
shoal_parse_headers(plain)
foreach(isa ${SHOAL_ISAS})
  if(NOT isa STREQUAL scalar)
    set(vectors <immintrin.h>)
  endif()
  shoal_parse_headers(${isa} ${vectors})
endforeach()
if(SHOAL_TESTS)
  shoal_parse_headers(test <gtest/gtest.h>)
  if(SHOAL_PRECOMPILE)
    target_link_libraries(headers_test PRIVATE GTest::gtest)
    set_target_properties(headers_test PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  endif()
endif()

# Sources that are compiled once per instruction set, each into the namespace SHOAL_ISA (cpu_scalar, cpu_avx2, cpu_avx512).
function(shoal_isa_sources target)
  foreach(source ${ARGN})
    get_filename_component(stem ${source} NAME_WE)
    foreach(isa ${SHOAL_ISAS})
      set(object ${stem}_${isa})
      add_library(${object} OBJECT ${source})
      string(TOUPPER ${isa} upper)
      target_compile_definitions(${object} PRIVATE SHOAL_ISA=cpu_${isa} SHOAL_ISA_${upper}=1)
      target_compile_options(${object} PRIVATE ${SHOAL_FLAGS_${isa}})
      target_link_libraries(${object} PRIVATE shoal_flags)
      shoal_use_headers(${object} ${isa})
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
      # The one library takes these too: what a target borrows is not among its own objects.
      set_property(GLOBAL APPEND PROPERTY SHOAL_LIBRARIES ${object})
    endforeach()
  endforeach()
endfunction()

function(shoal_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} shoal_testkit GTest::gtest GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE SHOAL_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/golden")
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)  # as the parsed headers
  shoal_use_headers(${name} test)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()

# Kernels of a target: objects of their own, since nothing but they is compiled by nvcc.
function(shoal_cuda_sources target)
  if(SHOAL_CUDA AND ARGN)
    add_library(${target}_cuda OBJECT ${ARGN})
    target_link_libraries(${target}_cuda PRIVATE shoal_cuda_flags CUDA::cudart_static)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
    set_property(GLOBAL APPEND PROPERTY SHOAL_LIBRARIES ${target}_cuda)
  endif()
endfunction()

function(shoal_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;ISA_SOURCES;CUDA_SOURCES;TESTS;BENCHES;DEPS" ${ARGN})
  set(library shoal_${name})
  list(TRANSFORM arg_DEPS PREPEND shoal_)
  add_library(${library} STATIC ${arg_SOURCES})
  target_link_libraries(${library} PUBLIC shoal_flags ${arg_DEPS})
  shoal_use_headers(${library} plain)
  shoal_isa_sources(${library} ${arg_ISA_SOURCES})
  shoal_cuda_sources(${library} ${arg_CUDA_SOURCES})
  set_property(GLOBAL APPEND PROPERTY SHOAL_LIBRARIES ${library})
  if(SHOAL_TESTS AND arg_TESTS)
    shoal_test(${name}_test SOURCES ${arg_TESTS} DEPS ${library})
  endif()
  if(SHOAL_BENCH)
    foreach(source ${arg_BENCHES})
      get_filename_component(bench ${source} NAME_WE)
      add_executable(${bench} ${source})
      target_link_libraries(${bench} PRIVATE ${library} shoal_testkit)
    endforeach()
  endif()
endfunction()

function(shoal_layer name)
  shoal_library(${name} ${ARGN})
endfunction()

# An operator's folder by the fixed file names of the style guide; what it does not have, it lacks.
function(shoal_op name)
  cmake_parse_arguments(arg "" "" "DEPS;EXTRA;CUDA_EXTRA" ${ARGN})
  set(CUDA_SOURCES ${arg_CUDA_EXTRA})
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/${name}_cuda.cu)
    list(APPEND CUDA_SOURCES ${name}/${name}_cuda.cu)
  endif()
  foreach(kind SOURCES ISA_SOURCES TESTS BENCHES)
    set(${kind} "")
  endforeach()
  foreach(file ${name}.cpp ${name}_ref.cpp)
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/${file})
      list(APPEND SOURCES ${name}/${file})
    endif()
  endforeach()
  foreach(pair ISA_SOURCES:_cpu TESTS:_test BENCHES:_bench)
    string(REPLACE ":" ";" pair ${pair})
    list(GET pair 0 kind)
    list(GET pair 1 suffix)
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/${name}${suffix}.cpp)
      list(APPEND ${kind} ${name}/${name}${suffix}.cpp)
    endif()
  endforeach()
  foreach(file ${arg_EXTRA})
    list(APPEND SOURCES ${name}/${file})
  endforeach()
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/${name}_cuda_test.cpp)
    list(APPEND TESTS ${name}/${name}_cuda_test.cpp)
  endif()
  shoal_library(${name} SOURCES ${SOURCES} ISA_SOURCES ${ISA_SOURCES} CUDA_SOURCES ${CUDA_SOURCES} TESTS ${TESTS}
    BENCHES ${BENCHES} DEPS base tensor quant cpu cuda ${arg_DEPS})
endfunction()
