// A call of a group over several hosts. Ranks that wait for each other's messages find out here whether they are in different
// calls, so they need not compare them before any data moves: that would take a round trip between the hosts. Messages carry
// a tag that is made of the call and its number, so ranks in different calls exchange nothing. A rank that waits writes its
// call into the store, and reads those of the other hosts. Made by hosts.cpp; used by comm/c10d.cpp, which sends the messages.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <stdexcept>
#include <string>

#include "backend/lookout.h"
#include "backend/roll_call.h"
#include "shm/collectives.h"

namespace gossamer {

// Every rank of the group throws it, with one text, and the group goes on.
struct CallsDiffer : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What another rank has said of the failure for which a wait ends.
struct KnownFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class CallAcross {
 public:
  // What the calls of a group have in common.
  struct Place {
    c10::intrusive_ptr<c10d::Store> store;  // of the group alone
    RollCall roll_call;
    shm::Group& local;
    Lookout lookout;
  };
  // To be called on every rank before the first call.
  static void prepare(const Place& place);

  // `number`: of the call in the group, from 1. `place`: lives as long as this object.
  CallAcross(Place& place, uint64_t number, const shm::Call& call, shm::Deadline deadline);

  int tag() const;            // of messages between ranks whose calls are alike
  int tag_of_number() const;  // of messages that compare the calls

  // Waits for a message. Throws CallsDiffer, KnownFailure, what `also` throws, or std::runtime_error if time is up.
  void wait(c10d::Work& work, const Look& also = {});
  // Makes `text` the error of this call on all ranks, unless there is one already. Returns that one then.
  std::string differ(const std::string& text);
  // The end of a call on a rank that had perhaps no message to wait for: throws CallsDiffer if another rank of this host has.
  // The ranks of the host must have met since.
  void end();

 private:
  struct Facts;  // what a look owns

  Place* place_;
  std::shared_ptr<Facts> facts_;
};

}  // namespace gossamer
