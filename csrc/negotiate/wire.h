// The messages of a negotiation and their bytes. Members send Submission, Leave and Failure to the coordinator (rank 0),
// which sends Decision and Stop to them. Numbers have the machine's byte order: all ranks of a job have one architecture,
// as c10d assumes too. A message that is too short or too long is an Error(comm), never a wild read.
#pragma once

#include <variant>

#include "negotiate/request.h"

namespace gossamer::negotiate {

using Bytes = std::vector<uint8_t>;

// What a rank has submitted since its last Submission.
struct Submission {
  uint64_t seen = 0;           // decisions it had carried out: shows which occupant of a slot a bit means
  std::vector<uint64_t> bits;  // slots of cached operations; the tail without bits is left out
  std::vector<Request> requests;
};

// Successive slots whose operations run, or one new response.
struct Run {
  int32_t first_slot = -1;
  int32_t slots = 0;                // 0: a response
  std::vector<Response> responses;  // one, or none
};
using Batch = std::vector<Run>;  // runs together

struct Decision {
  uint64_t sequence = 0;
  std::vector<Batch> batches;
};

// A member shuts down.
struct Leave {};
// A member has failed.
struct Failure {
  std::string reason;
};
// The end of the negotiation, for all ranks.
struct Stop {
  std::string reason;
};

using Message = std::variant<Submission, Decision, Leave, Failure, Stop>;

Bytes encode(const Message& message);
Message decode(const Bytes& bytes);

}  // namespace gossamer::negotiate
