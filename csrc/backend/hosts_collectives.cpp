// The collectives over several hosts; see hosts.h.
#include <cstring>

#include "backend/hosts.h"
#include "errors.h"
#include "shm/pieces.h"

namespace gossamer {
namespace {

using shm::at;
using shm::call_for;

// The first element of part `index`, where `count` elements are cut into `parts` parts as equal as possible.
int64_t cut(int64_t count, int64_t parts, int64_t index) {
  return count / parts * index + count % parts * index / parts;
}

}  // namespace

// Each rank of a host holds one range of the buffer, summed over the host. Hosts may differ in their number of ranks, so
// a range may overlap several ranges of another host. The starts of all ranges cut the buffer into stretches; each stretch
// lies in one range of every host, whose rank carries it. A stretch is cut into one part for each host; that host's
// carrier sums the part, in the order of the hosts.
void Hosts::reduce_across(void* data, int64_t count, const shm::Summing& summing, CallAcross& call,
                          shm::Deadline deadline) {
  const int places = local_.size();
  const int hosts = host_count();
  const int own_host = local_.host();
  const shm::Type type = summing.reduction.from;
  const shm::Type wide = shm::accumulate_type(type);
  const int64_t element = shm::element_size(type);
  const int64_t wide_element = shm::element_size(wide);
  const int64_t begin = cut(count, places, local_.rank());
  const int64_t end = cut(count, places, local_.rank() + 1);

  std::vector<const void*> ins;
  std::vector<int64_t> counts;
  for (int place = 0; place < places; ++place) {
    ins.push_back(at(data, cut(count, places, place) * element));
    counts.push_back(cut(count, places, place + 1) - cut(count, places, place));
  }
  std::vector<uint8_t> partial((end - begin) * wide_element);
  shm::Summing inside = summing;
  inside.reduction.to = wide;
  inside.reduction.divisor = 1;
  shm::reduce_scatter(local_, ins.data(), partial.data(), counts.data(), inside, deadline);

  struct Stretch {
    int64_t begin, end;
    std::vector<int> carriers;  // by host
  };
  std::vector<Stretch> stretches;
  for (int64_t at_element = begin; at_element < end;) {
    Stretch stretch{at_element, end, {}};
    for (int host = 0; host < hosts; ++host) {
      const int64_t others = static_cast<int64_t>(ranks_of(host).size());
      int64_t place = 0;
      while (cut(count, others, place + 1) <= at_element) ++place;
      stretch.carriers.push_back(ranks_of(host)[place]);
      stretch.end = std::min(stretch.end, cut(count, others, place + 1));
    }
    at_element = stretch.end;
    stretches.push_back(std::move(stretch));
  }
  const auto part_of = [hosts](const Stretch& stretch, int host) {
    const int64_t length = stretch.end - stretch.begin;
    const int64_t first = stretch.begin + cut(length, hosts, host);
    return shm::Range{first, stretch.begin + cut(length, hosts, host + 1) - first};
  };

  std::vector<Part> sends;
  std::vector<Part> receives;
  std::vector<std::vector<uint8_t>> theirs;  // by stretch and host
  for (const auto& stretch : stretches) {
    for (int host = 0; host < hosts; ++host) {
      theirs.emplace_back();
      if (host == own_host) continue;
      const shm::Range out = part_of(stretch, host);
      sends.push_back({partial.data() + (out.begin - begin) * wide_element, out.count * wide_element,
                       stretch.carriers[host]});
      const shm::Range in = part_of(stretch, own_host);
      theirs.back().resize(in.count * wide_element);
      receives.push_back({theirs.back().data(), in.count * wide_element, stretch.carriers[host]});
    }
  }
  const auto across = [&] {
    transfer(sends, receives, call);

    sends.clear();
    receives.clear();
    shm::Fold finish = summing.reduction;
    finish.from = wide;
    if (finish.op == shm::Op::premul_sum) finish.op = shm::Op::sum;  // the factors are applied already
    for (size_t i = 0; i < stretches.size(); ++i) {
      const shm::Range own = part_of(stretches[i], own_host);
      std::vector<const void*> sources;
      for (int host = 0; host < hosts; ++host) {
        sources.push_back(host == own_host ? partial.data() + (own.begin - begin) * wide_element
                                           : theirs[i * hosts + host].data());
      }
      void* result = at(data, own.begin * element);
      shm::reduce(finish, sources.data(), hosts, &result, 1, own.count);
      for (int host = 0; host < hosts; ++host) {
        if (host == own_host) continue;
        sends.push_back({result, own.count * element, stretches[i].carriers[host]});
        const shm::Range other = part_of(stretches[i], host);
        receives.push_back(
            {at(data, other.begin * element), other.count * element, stretches[i].carriers[host]});
      }
    }
    transfer(sends, receives, call);
  };
  const auto spread = [&] {
    std::vector<void*> outs;
    for (int place = 0; place < places; ++place) {
      outs.push_back(const_cast<void*>(ins[place]));
      counts[place] *= element;
    }
    shm::all_gather(local_, outs[local_.rank()], outs.data(), counts.data(), deadline);
  };
  finish(call, deadline, across, spread);
}

void Hosts::all_reduce(void* data, int64_t count, const shm::Summing& summing, shm::Deadline deadline) {
  run([&] {
    CallAcross call = enter(call_for(shm::CallKind::all_reduce, count, summing), deadline);
    reduce_across(data, count, summing, call, deadline);
  });
}

void Hosts::reduce(void* data, int64_t count, const shm::Summing& summing, int root, shm::Deadline deadline) {
  run([&] {
    CallAcross call = compare(call_for(shm::CallKind::reduce, count, summing, root), deadline);
    const int64_t bytes = count * shm::element_size(summing.reduction.from);
    std::vector<uint8_t> copy(static_cast<uint8_t*>(data), static_cast<uint8_t*>(data) + bytes);
    reduce_across(copy.data(), count, summing, call, deadline);
    if (rank_ == root) shm::copy(data, copy.data(), bytes);
  });
}

void Hosts::reduce_scatter(const void* const* ins, void* out, int64_t count, const shm::Summing& summing,
                           shm::Deadline deadline) {
  run([&] {
    CallAcross call = enter(call_for(shm::CallKind::reduce_scatter, count, summing), deadline);
    const int64_t bytes = count * shm::element_size(summing.reduction.from);
    std::vector<uint8_t> whole(bytes * size_);
    for (int rank = 0; rank < size_; ++rank) shm::copy(whole.data() + rank * bytes, ins[rank], bytes);
    reduce_across(whole.data(), count * size_, summing, call, deadline);
    shm::copy(out, whole.data() + rank_ * bytes, bytes);
  });
}

void Hosts::broadcast(void* data, int64_t bytes, int root, shm::Deadline deadline) {
  run([&] {
    CallAcross call = compare(call_for(shm::CallKind::broadcast, bytes, root), deadline);
    const int home = host_of_[root];
    std::vector<Part> sends;
    std::vector<Part> receives;
    for (int host = 0; host < host_count(); ++host) {
      if (host == home) continue;
      if (rank_ == root) sends.push_back({data, bytes, ranks_of(host)[0]});
      if (rank_ == ranks_of(host)[0]) receives.push_back({data, bytes, root});
    }
    transfer(sends, receives, call);
    shm::broadcast(local_, data, bytes, local_.host() == home ? place_of_[root] : 0, deadline);
  });
}

// Every part crosses once to each other host, to one of its ranks, which then hands it on inside the host.
void Hosts::all_gather(const void* in, void* const* outs, int64_t bytes, shm::Deadline deadline) {
  run([&] {
    CallAcross call = enter(call_for(shm::CallKind::all_gather, bytes), deadline);
    // The ranks whose parts each local rank hands on, its own first.
    std::vector<std::vector<int>> carried(local_.size());
    std::vector<Part> sends;
    for (int rank = 0; rank < size_; ++rank) {
      const int place = place_of_[rank] % local_.size();
      if (host_of_[rank] == local_.host()) carried[place].insert(carried[place].begin(), rank);
      if (host_of_[rank] != local_.host()) carried[place].push_back(rank);
    }
    for (int host = 0; host < host_count(); ++host) {
      if (host == local_.host()) continue;
      sends.push_back({const_cast<void*>(in), bytes, carrier(host, local_.rank())});
    }
    const auto& own = carried[local_.rank()];
    std::vector<uint8_t> mine(own.size() * bytes);
    std::vector<Part> receives;
    shm::copy(mine.data(), in, bytes);
    for (size_t i = 1; i < own.size(); ++i) receives.push_back({mine.data() + i * bytes, bytes, own[i]});

    std::vector<std::vector<uint8_t>> theirs(local_.size());
    std::vector<void*> parts;
    std::vector<int64_t> part_bytes;
    for (int place = 0; place < local_.size(); ++place) {
      part_bytes.push_back(static_cast<int64_t>(carried[place].size()) * bytes);
      theirs[place].resize(part_bytes.back());
      parts.push_back(theirs[place].data());
    }
    finish(
        call, deadline, [&] { transfer(sends, receives, call); },
        [&] { shm::all_gather(local_, mine.data(), parts.data(), part_bytes.data(), deadline); });
    for (int place = 0; place < local_.size(); ++place) {
      for (size_t i = 0; i < carried[place].size(); ++i) {
        shm::copy(outs[carried[place][i]], theirs[place].data() + i * bytes, bytes);
      }
    }
  });
}

void Hosts::gather(const void* in, void* const* outs, int64_t bytes, int root, shm::Deadline deadline) {
  run([&] {
    CallAcross call = compare(call_for(shm::CallKind::gather, bytes, root), deadline);
    std::vector<Part> receives;
    for (int rank = 0; rank_ == root && rank < size_; ++rank) receives.push_back({outs[rank], bytes, rank});
    transfer({{const_cast<void*>(in), bytes, root}}, receives, call);
  });
}

void Hosts::scatter(const void* const* ins, void* out, int64_t bytes, int root, shm::Deadline deadline) {
  run([&] {
    CallAcross call = compare(call_for(shm::CallKind::scatter, bytes, root), deadline);
    std::vector<Part> sends;
    for (int rank = 0; rank_ == root && rank < size_; ++rank) {
      sends.push_back({const_cast<void*>(ins[rank]), bytes, rank});
    }
    transfer(sends, {{out, bytes, root}}, call);
  });
}

void Hosts::all_to_all(const void* const* ins, const int64_t* in_bytes, void* const* outs,
                       const int64_t* out_bytes, shm::Deadline deadline) {
  run([&] {
    CallAcross call = compare(call_for(shm::CallKind::all_to_all, 0), deadline);
    std::vector<Part> sends;
    std::vector<Part> receives;
    // Every rank looks at all pairs, so that all throw alike. A row: bytes sent to each rank, then bytes expected from each.
    std::vector<int64_t> table(in_bytes, in_bytes + size_);
    table.insert(table.end(), out_bytes, out_bytes + size_);
    const int64_t row = 2 * size_;
    const int64_t row_bytes = row * static_cast<int64_t>(sizeof(int64_t));
    std::vector<int64_t> tables(row * size_);
    for (int rank = 0; rank < size_; ++rank) {
      sends.push_back({table.data(), row_bytes, rank});
      receives.push_back({tables.data() + rank * row, row_bytes, rank});
    }
    transfer(sends, receives, call);
    shm::compare_splits(
        size_, [](int rank) { return rank; },
        [&](int rank, int index) { return tables[rank * row + index]; });
    sends.clear();
    receives.clear();
    for (int rank = 0; rank < size_; ++rank) {
      sends.push_back({const_cast<void*>(ins[rank]), in_bytes[rank], rank});
      receives.push_back({outs[rank], out_bytes[rank], rank});
    }
    transfer(sends, receives, call);
  });
}

void Hosts::agree(const shm::Call& call, shm::Deadline deadline) {
  run([&] { compare(call, deadline); });
}

CallAcross Hosts::begin(const shm::Call& call, shm::Deadline deadline) {
  std::optional<CallAcross> begun;
  run([&] { begun = enter(call, deadline); });
  return *begun;
}

void Hosts::barrier(shm::Deadline deadline) { agree(shm::Call(), deadline); }

void Hosts::agree_on_count(int64_t count, shm::Deadline deadline) {
  agree(call_for(shm::CallKind::several, count), deadline);
}

void Hosts::refuse(const std::string& reason, shm::Deadline deadline) {
  run([&] { compare(shm::Call(), deadline, reason); });
}

}  // namespace gossamer
