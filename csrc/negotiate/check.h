// Whether the requests of all ranks for one name can become one operation, and which. Called by the matching table, on the
// coordinator alone; its messages reach every rank.
#pragma once

#include "negotiate/request.h"

namespace gossamer::negotiate {

using Requests = std::vector<std::shared_ptr<const Request>>;  // by rank; null: not submitted

// What is wrong with this rank's request by itself; empty if nothing is. `size`: of the process set.
std::string complaint(const Request& request, int size);

// The agreed response, or one whose error says which ranks differ in what. Ranks without a request have joined. `ranks`
// are the numbers that messages show: ranks of the whole job.
Response agree(const Requests& requests, const std::vector<int>& ranks);

// Whether all ranks that submitted it gave it the same group, of the same size.
bool same_group(const Requests& requests);

}  // namespace gossamer::negotiate
