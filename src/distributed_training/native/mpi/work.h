// The handle of an operation: what torch.distributed gives to its caller.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace dtrain {

class MpiWork : public c10d::Work {
 public:
  /// `outputs` are the value of the future; `kept` are tensors that must live until the operation is done.
  MpiWork(int rank, c10d::OpType type, const char* title, uint64_t sequence, std::vector<at::Tensor> outputs,
          std::vector<at::Tensor> kept, std::chrono::milliseconds timeout);

  /// Waits for the end; throws what the operation threw. Without a timeout the deadline of the operation ends it.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Ends it, with or without an error. Never blocks: callbacks of the future run in threads of their own, because they
  /// may wait for other operations, which the communication thread has to do.
  void complete(const std::exception_ptr& error = nullptr);
  void set_source(int rank) { source_ = rank; }
  /// The stream on which results were copied to the device; the future's events are recorded there.
  void set_stream(const c10::Stream& stream) { stream_ = stream; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

 private:
  static void fulfil(const c10::intrusive_ptr<c10::ivalue::Future>& future, const std::vector<at::Tensor>& value,
                     const std::optional<c10::Stream>& stream, const std::exception_ptr& error);

  const uint64_t sequence_;
  std::vector<at::Tensor> outputs_, kept_;
  std::chrono::milliseconds timeout_;
  std::atomic<int> source_{-1};
  std::optional<c10::Stream> stream_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace dtrain
