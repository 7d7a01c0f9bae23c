// Errors of the torch side: exceptions that become gossamer.errors classes in Python, even across torch's autograd engine.
// This header knows no Python; python/errors.cpp makes the exceptions. The Torch-free core does not use them:
// python/module.cpp translates its gossamer::Error.
#pragma once

#include <cstdint>
#include <exception>
#include <sstream>
#include <string>

#include "base/check.h"

namespace gossamer {

// What a PythonError carries. Catch it by this class: `catch (const RaisedError& error)`. It is no std::exception itself.
struct RaisedError {
  ErrorKind kind;
  std::string message;
};

// A PythonError: an exception of the Python class for `kind`.
std::exception_ptr make_python_error(ErrorKind kind, std::string message);

// Throws a PythonError; the text is the parts.
template <class... Parts>
[[noreturn]] void raise_python(ErrorKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  std::rethrow_exception(make_python_error(kind, text.str()));
}

// Throws PythonError(config) unless ok. Checks the arguments that a user gives to an operation.
template <class... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) raise_python(ErrorKind::config, parts...);
}

// Throws Python's AssertionError, for misuse that programs expect to raise it.
[[noreturn]] void raise_assertion(std::string message);

// Whether the error came out of Python, or has a Python class that it must keep.
bool has_python_class(const std::exception& error);

// c10d's errors carry a C++ backtrace after the first line; the first line is what a user can act on.
std::string first_line(const char* text);

// "6.3 MB" or "512 bytes", for messages.
std::string readable_bytes(int64_t bytes);

}  // namespace gossamer
