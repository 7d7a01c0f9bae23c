// The one exception of the Torch-free core, and the macro that throws it. module.cpp turns `kind` into the Python class
// (ConfigError, CodecError, CommError). The files of one instruction set do not include this: std::string code that was
// compiled with AVX flags must not reach the linker.
// A message reads `where: what must hold, got what; what to do.`
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace gossamer {

enum class ErrorKind { config, codec, comm };

struct Error : std::runtime_error {
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  ErrorKind kind;
};

template <class... Parts>
[[noreturn]] void raise(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace gossamer

// GOSSAMER_CHECK(n > 0, ErrorKind::codec, "row_bytes: n must be positive, got ", n, "; ...")
#define GOSSAMER_CHECK(condition, kind, ...)                \
  do {                                                      \
    if (!(condition)) ::gossamer::raise(kind, __VA_ARGS__); \
  } while (false)
