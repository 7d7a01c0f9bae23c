// The texts of errors.h. The exceptions themselves are made in python/errors.cpp.
#include "errors.h"

#include <cstdio>

namespace gossamer {

std::string first_line(const char* text) {
  const std::string whole(text);
  return whole.substr(0, whole.find('\n'));
}

std::string readable_bytes(int64_t bytes) {
  if (bytes < 100000) return std::to_string(bytes) + " bytes";
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

}  // namespace gossamer
