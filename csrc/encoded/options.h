// What a user of the backend "gossamer" chooses for a group: the codecs of its sums and gathers. Python's gs.Options.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>
#include <string>
#include <vector>

#include "collectives/two_shot.h"

namespace gossamer {

struct CodecOptions : c10d::Backend::Options {
  CodecOptions() : c10d::Backend::Options("gossamer") {}

  std::optional<CodecChoice> codec;         // of sums; none: they are exact
  std::optional<CodecChoice> gather_codec;  // of all-gathers
  int64_t min_bytes = 0;                    // smaller tensors travel as they are
  std::optional<std::vector<std::vector<int>>>
      hosts;         // the ranks of each host; none: as connect_by_hosts() finds them
  std::string text;  // all of this in words, which the ranks compare
};

}  // namespace gossamer
