// See check.h.
#include "negotiate/check.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace gossamer::negotiate {
namespace {

template <class T>
std::string text(const T& value) {
  std::ostringstream stream;
  stream.precision(17);
  stream << value;
  return stream.str();
}

bool scatters_rows(Collective kind) {
  return kind == Collective::allgather || kind == Collective::alltoall || kind == Collective::reducescatter;
}
bool reduces(Collective kind) { return kind == Collective::allreduce || kind == Collective::reducescatter; }
bool rows_may_differ(Collective kind) {
  return kind == Collective::allgather || kind == Collective::alltoall;
}

// One property that must be equal; `show` also decides equality, and is called for operations that differ anyway.
struct Property {
  const char* what;
  bool (*differs)(const Request&, const Request&);
  std::string (*show)(const Request&);
};

const Property kProperties[] = {
    {"kind", [](const Request& a, const Request& b) { return a.kind != b.kind; },
     [](const Request& r) { return std::string(name(r.kind)); }},
    {"dtype", [](const Request& a, const Request& b) { return a.dtype != b.dtype; },
     [](const Request& r) { return r.dtype; }},
    {"device", [](const Request& a, const Request& b) { return a.device != b.device; },
     [](const Request& r) { return r.device; }},
    {"reduction", [](const Request& a, const Request& b) { return reduces(a.kind) && a.op != b.op; },
     [](const Request& r) { return std::string(name(r.op)); }},
    {"prescale factor", [](const Request& a, const Request& b) { return a.prescale != b.prescale; },
     [](const Request& r) { return text(r.prescale); }},
    {"postscale factor", [](const Request& a, const Request& b) { return a.postscale != b.postscale; },
     [](const Request& r) { return text(r.postscale); }},
    {"root rank",
     [](const Request& a, const Request& b) { return a.kind == Collective::broadcast && a.root != b.root; },
     [](const Request& r) { return text(r.root); }},
    {"group",
     [](const Request& a, const Request& b) { return a.group != b.group || a.group_size != b.group_size; },
     [](const Request& r) {
       return r.group_size > 0 ? "'" + r.group + "' of " + text(r.group_size) : std::string("none");
     }},
    {"shape",
     [](const Request& a, const Request& b) {
       if (!rows_may_differ(a.kind) || a.shape.size() != b.shape.size()) return a.shape != b.shape;
       return !std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1);
     },
     [](const Request& r) { return list(r.shape); }},
    {"process set",
     [](const Request& a, const Request& b) {
       return a.kind != Collective::alltoall && a.numbers != b.numbers;
     },
     [](const Request& r) { return list(r.numbers); }},
};

std::string what(const Request& request) {
  return std::string(name(request.kind)) + " '" + request.name + "'";
}

std::string at(const Request& request) {
  return request.call_site.empty() ? "" : " (" + request.call_site + ")";
}

// "[2] on ranks 0, 2 (train.py:3) and [3] on rank 1 (train.py:7)"
std::string both_sides(const Requests& requests, const std::vector<int>& ranks, const Property& property) {
  struct Side {
    std::string value, site;
    std::vector<int> ranks;
  };
  std::vector<Side> sides;
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    if (!requests[rank]) continue;
    const std::string value = property.show(*requests[rank]);
    auto side =
        std::find_if(sides.begin(), sides.end(), [&](const Side& other) { return other.value == value; });
    if (side == sides.end()) side = sides.insert(side, {value, at(*requests[rank]), {}});
    side->ranks.push_back(ranks[rank]);
  }
  std::string text;
  for (const Side& side : sides) {
    text += (text.empty() ? "" : " and ") + side.value + " on " + name_ranks(side.ranks) + side.site;
  }
  return text;
}

std::string disagreement(const Requests& requests, const std::vector<int>& ranks) {
  const Request* first = nullptr;
  std::vector<int> joined;
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    if (!requests[rank]) {
      joined.push_back(ranks[rank]);
    } else if (!requests[rank]->refusal.empty()) {
      return "negotiate: " + what(*requests[rank]) + " was refused by rank " + text(ranks[rank]) +
             at(*requests[rank]) + ": " + requests[rank]->refusal;
    } else if (first == nullptr) {
      first = requests[rank].get();
    }
  }
  for (const Property& property : kProperties) {
    const bool differs = std::any_of(requests.begin(), requests.end(), [&](const auto& request) {
      return request && property.differs(*first, *request);
    });
    if (differs) {
      return "negotiate: '" + first->name + "' must have the same " + property.what + " on all ranks, got " +
             both_sides(requests, ranks, property) + "; make them equal";
    }
  }
  if (!joined.empty() && first->kind != Collective::allreduce && first->kind != Collective::barrier) {
    return "negotiate: " + what(*first) + at(*first) + " needs every rank, but " + name_ranks(joined) +
           (joined.size() == 1 ? " has" : " have") + " joined; only allreduce and barrier go on without them";
  }
  return {};
}

void add_sizes(Response& response, const Requests& requests) {
  const Collective kind = response.request.kind;
  const int64_t row = response.request.shape.empty()
                          ? 1
                          : std::accumulate(response.request.shape.begin() + 1, response.request.shape.end(),
                                            int64_t{1}, std::multiplies<int64_t>());
  response.bytes = element_count(response.request) * response.request.element_bytes;
  if (!rows_may_differ(kind)) return;
  for (const auto& request : requests) {
    if (kind == Collective::allgather) response.sizes.push_back(request->shape[0]);
    if (kind == Collective::alltoall) {
      response.sizes.insert(response.sizes.end(), request->numbers.begin(), request->numbers.end());
    }
  }
  response.bytes = std::accumulate(response.sizes.begin(), response.sizes.end(), int64_t{0}) * row *
                   response.request.element_bytes;
}

}  // namespace

std::string complaint(const Request& request, int size) {
  const auto negative = [](int64_t number) { return number < 0; };
  if (request.kind == Collective::broadcast && (request.root < 0 || request.root >= size)) {
    return "the root must be a rank below " + text(size) + ", got " + text(request.root);
  }
  if (!moves_data(request.kind)) return {};
  if (request.element_bytes < 1)
    return "an element must have 1 byte at least, got " + text(request.element_bytes);
  if (std::any_of(request.shape.begin(), request.shape.end(), negative)) {
    return "a shape must have no negative extent, got " + list(request.shape);
  }
  if (scatters_rows(request.kind) && request.shape.empty()) {
    return "the tensor must have a dimension 0 to divide, got a scalar";
  }
  if (request.kind != Collective::alltoall) return {};
  const int64_t rows = std::accumulate(request.numbers.begin(), request.numbers.end(), int64_t{0});
  const bool fits = request.numbers.size() == static_cast<size_t>(size) && rows == request.shape[0] &&
                    std::none_of(request.numbers.begin(), request.numbers.end(), negative);
  if (fits) return {};
  return "the splits must be " + text(size) + " numbers of 0 or more with the sum " + text(request.shape[0]) +
         ", got " + list(request.numbers);
}

Response agree(const Requests& requests, const std::vector<int>& ranks) {
  Response response;
  response.error = disagreement(requests, ranks);
  const auto first =
      std::find_if(requests.begin(), requests.end(), [](const auto& request) { return request; });
  response.request = **first;
  if (!response.error.empty()) return response;
  for (const auto& request : requests)
    response.device_indices.push_back(request ? request->device_index : -1);
  add_sizes(response, requests);
  return response;
}

bool same_group(const Requests& requests) {
  const Request* first = nullptr;
  for (const auto& request : requests) {
    if (!request) continue;
    if (first == nullptr) first = request.get();
    if (request->group != first->group || request->group_size != first->group_size) return false;
  }
  return true;
}

}  // namespace gossamer::negotiate
