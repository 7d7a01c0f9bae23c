// Whether the requests of all ranks for one name can become one operation, and what that operation is. Called by the
// matching table, on the coordinator alone; its messages reach every rank.
#pragma once

#include "negotiate/request.h"

namespace gossamer::negotiate {

using Requests = std::vector<std::shared_ptr<const Request>>;  // by rank; null: not submitted

// What is wrong with this rank's request alone; empty: nothing. `size`: of the process set.
std::string complaint(const Request& request, int size);

// The agreed response, or one whose error says what differs between whom. Ranks without a request have joined.
// `ranks` are the numbers that messages show: ranks of the whole job.
Response agree(const Requests& requests, const std::vector<int>& ranks);

// Whether all that submitted it named the same group, of the same size.
bool same_group(const Requests& requests);

}  // namespace gossamer::negotiate
