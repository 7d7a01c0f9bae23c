# A toolchain file for CMake: compiles for 64-bit ARM on another machine, and runs the programs in QEMU. Debian has both as
# g++-aarch64-linux-gnu and qemu-user.
#   cmake -S cmake -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
