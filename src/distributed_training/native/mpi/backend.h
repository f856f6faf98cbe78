// The backend that torch.distributed sees: tensors in, Work out. What happens to the bytes is in group.h.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "group.h"
#include "staging.h"
#include "work.h"

namespace dtrain {

constexpr const char* kBackendName = "dtrain_mpi";

class MpiBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Meets the other members through the store (their ranks in MPI's world), then over MPI.
  static c10::intrusive_ptr<MpiBackend> create(const c10::intrusive_ptr<c10d::Store>& store, GroupSettings settings);

  MpiBackend(std::shared_ptr<Group> group, std::chrono::milliseconds timeout);
  ~MpiBackend() override;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allreduce_compressed(const at::Tensor& tensor, Wire wire, bool average);
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;

  const Group& group() const { return *group_; }

 private:
  /// An operation as it runs, in the communication thread or in the caller's.
  struct Running {
    Group& group;
    Stage& stage;
    Group::Timeout timeout;
    void* read(const at::Tensor& tensor) { return stage.host(tensor, Stage::Use::read); }
    void* write(const at::Tensor& tensor) { return stage.host(tensor, Stage::Use::write); }
    void* both(const at::Tensor& tensor) { return stage.host(tensor, Stage::Use::both); }
  };
  struct Request {
    c10d::OpType type;
    const char* what;
    Tensors outputs;
    Tensors inputs;
    std::chrono::milliseconds timeout;
    bool may_run_here = false;  // the caller waits anyway, and on one host the operation stays in its memory
  };
  WorkPtr submit(Request request, std::function<void(Running&)> body);
  WorkPtr transfer(c10d::OpType type, const char* what, Tensors& tensors, int peer, int tag);
  WorkPtr allreduce_all(c10d::OpType type, const Tensors& tensors, const c10d::AllreduceOptions& options);
  WorkPtr allgather_all(c10d::OpType type, std::vector<std::pair<at::Tensor, at::Tensor>> pairs,
                        const c10d::AllgatherOptions& options);
  WorkPtr reduce_scatter_all(c10d::OpType type, std::vector<std::pair<at::Tensor, at::Tensor>> pairs,
                             const c10d::ReduceScatterOptions& options);
  std::chrono::milliseconds timeout_or_own(std::chrono::milliseconds timeout) const;

  std::shared_ptr<Group> group_;
  std::chrono::milliseconds timeout_;
  std::mutex submitting_;  // order of numbers = order in the queue
  std::atomic<uint64_t> sequence_{0};
  std::shared_ptr<std::atomic<int>> outstanding_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<bool> closed_{false};
};

}  // namespace dtrain
