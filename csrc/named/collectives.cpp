// See collectives.h.
#include "named/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "backend/backend.h"
#include "named/c10d_transport.h"
#include "named/elements.h"
#include "named/host_transport.h"

namespace gossamer::named {

using negotiate::Collective;
using negotiate::Operation;

namespace {

// `control` as a backend "gossamer" whose ranks share one host; null if it is something else.
c10::intrusive_ptr<GossamerBackend> on_one_host(const c10::intrusive_ptr<c10d::Backend>& control) {
  auto* shared = dynamic_cast<GossamerBackend*>(control.get());
  if (shared == nullptr || shared->hosts().size() != 1) return {};
  return c10::intrusive_ptr<GossamerBackend>::reclaim_copy(shared);
}

std::unique_ptr<negotiate::Transport> open_transport(c10::intrusive_ptr<c10d::Backend> control,
                                                     const std::shared_ptr<BatchRunner>& runner) {
  if (auto shared = on_one_host(control)) return std::make_unique<HostTransport>(std::move(shared));
  return std::make_unique<C10dTransport>(std::move(control), [runner] { runner->announce_failure(); });
}

std::string words(Collective kind, const std::string& name) {
  return std::string("gossamer: ") + negotiate::name(kind) + (name.empty() ? "" : " '" + name + "'");
}

bool may_be_in_place(Collective kind) {
  return kind == Collective::allreduce || kind == Collective::broadcast;
}

}  // namespace

NamedCollectives::NamedCollectives(c10::intrusive_ptr<c10d::Backend> control, Devices devices,
                                   CommunicatorPtr near, negotiate::Options options)
    : rank_(control->getRank()),
      ranks_(options.ranks),
      runner_(std::make_shared<BatchRunner>(std::move(devices), std::move(near))) {
  const int size = control->getSize();
  auto transport = open_transport(std::move(control), runner_);
  negotiator_ = std::make_shared<negotiate::Negotiator>(
      rank_, size, std::move(transport),
      [runner = runner_](const std::vector<negotiate::Part>& parts) { runner->run(parts); },
      std::move(options));
}

NamedCollectives::~NamedCollectives() = default;

void NamedCollectives::shutdown() { negotiator_->shutdown(); }

std::string NamedCollectives::complaint(const Call& call, const at::Tensor& tensor) const {
  if (call.in_place && !may_be_in_place(call.kind))
    return "it cannot work in place, because its result has another shape";
  if (call.in_place && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "the tensor is written to, so it must not hold an element twice, as one from expand() does";
  }
  if (call.op == negotiate::Aggregate::adasum && call.kind == Collective::reducescatter) {
    return "Adasum needs the whole tensor; take Sum or Average";
  }
  return runner_->complaint(call.kind, call.op, tensor);
}

Operation NamedCollectives::operation_of(const Call& call, size_t index, const TicketPtr& ticket) const {
  const at::Tensor& tensor = call.tensors[index];
  Operation operation;
  negotiate::Request& request = operation.request;
  request.kind = call.kind;
  request.op = call.op;
  request.element_bytes = static_cast<int32_t>(tensor.element_size());
  request.device_index = tensor.is_cpu() ? 0 : tensor.device().index();
  request.root = call.root;
  request.prescale = call.prescale;
  request.postscale = call.postscale;
  request.name = call.names[index];
  request.dtype = dtype_name(tensor.scalar_type());
  request.device = c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
  request.call_site = call.call_site;
  request.shape = tensor.sizes().vec();
  if (call.kind == Collective::alltoall && !request.shape.empty()) {
    request.numbers = call.splits ? *call.splits : std::vector<int64_t>(size(), request.shape[0] / size());
  }
  Ticket::Data& data = ticket->data();
  data.input = tensor.detach();
  if (call.in_place) data.target = data.input;
  if (!tensor.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(tensor.device().type());
    data.submitted.emplace(tensor.device().type());
    data.submitted->record(guard.getStream(tensor.device()));
  }
  operation.payload = ticket;
  operation.done = [ticket](const negotiate::Result& result) { ticket->complete(result); };
  return operation;
}

std::vector<TicketPtr> NamedCollectives::submit(const Call& call) {
  GOSSAMER_CHECK(call.tensors.size() == call.names.size() && !call.tensors.empty(), ErrorKind::config,
                 words(call.kind, ""), ": needs a name for each of one or more tensors, got ",
                 call.tensors.size(), " tensors and ", call.names.size(), " names");
  GOSSAMER_CHECK(!call.splits || call.tensors.size() == 1, ErrorKind::config, words(call.kind, ""),
                 ": splits belong to one tensor, got ", call.tensors.size());
  std::vector<TicketPtr> tickets;
  std::vector<Operation> operations;
  std::string problem;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    tickets.push_back(std::make_shared<Ticket>(call.names[i], negotiator_));
    operations.push_back(operation_of(call, i, tickets.back()));
    const std::string why = complaint(call, call.tensors[i]);
    if (problem.empty() && !why.empty()) problem = words(call.kind, call.names[i]) + ": " + why;
  }
  if (!problem.empty()) {
    for (Operation& operation : operations) {
      operation.request.refusal = problem;
      operation.done = nullptr;
      operation.payload = nullptr;
    }
  }
  if (call.group) {
    negotiator_->submit_group(std::move(operations), *call.group);
  } else {
    for (Operation& operation : operations) negotiator_->submit(std::move(operation));
  }
  GOSSAMER_CHECK(problem.empty(), ErrorKind::config, problem);
  return tickets;
}

TicketPtr NamedCollectives::submit(negotiate::Request request) {
  auto ticket = std::make_shared<Ticket>(negotiate::name(request.kind), negotiator_);
  Operation operation;
  operation.request = std::move(request);
  operation.done = [ticket](const negotiate::Result& result) { ticket->complete(result); };
  negotiator_->submit(std::move(operation));
  return ticket;
}

TicketPtr NamedCollectives::submit(Collective kind, std::vector<int64_t> numbers,
                                   const std::string& call_site) {
  negotiate::Request request;
  request.kind = kind;
  request.numbers = std::move(numbers);
  request.call_site = call_site;
  return submit(std::move(request));
}

TicketPtr NamedCollectives::refuse_join(const std::string& reason, const std::string& call_site) {
  negotiate::Request request;
  request.kind = Collective::join;
  request.refusal = reason;
  request.call_site = call_site;
  return submit(std::move(request));
}

void NamedCollectives::refuse(Collective kind, const std::string& name, const std::string& reason,
                              const std::string& call_site) {
  negotiate::Request request;
  request.kind = kind;
  request.name = name;
  request.call_site = call_site;
  negotiator_->refuse(std::move(request), reason);
}

}  // namespace gossamer::named
