// Tensors as host memory: what an operation reads and writes, wherever the tensor lives.
//
// A contiguous tensor on the CPU is used as it is. One that is not contiguous goes through a copy. One on a device goes
// through pinned memory, copied on a stream of our own: the point in the caller's stream is recorded when the operation
// is submitted, and an operation is done only when its results have arrived on the device. No CUDA headers are needed.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

#include "engine.h"

namespace dtrain {

class Stage {
 public:
  enum class Use { read, write, both };

  /// In the caller's thread: remembers where the current stream of the tensors' device stands.
  explicit Stage(const std::vector<at::Tensor>& tensors);
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  bool on_device() const { return event_.has_value(); }
  /// Set before use: when waits for the device are given up.
  void set_deadline(Clock::time_point deadline) { deadline_ = deadline; }
  /// Our stream on the device, if the tensors are on one.
  std::optional<c10::Stream> stream() const { return stream_; }

  /// Where the tensor is (or will be) in host memory. Data are there only after fetch().
  void* host(const at::Tensor& tensor, Use use);
  /// For MPI that takes device pointers: the tensor's own memory where that will do, else as host(). Safe after
  /// fetch().
  void* place(const at::Tensor& tensor, Use use, bool takes_device_memory);
  /// Waits until what host() promised has arrived. Needed also without devices.
  void fetch();
  /// Writes results back and waits until they are there.
  void give_back();

  /// A long tensor on a device, piece by piece: while `work` has one piece in host memory the next is on its way from
  /// the device and the one before on its way back. Takes the place of host(), fetch() and give_back().
  void in_pieces(const at::Tensor& tensor, size_t piece_bytes, const std::function<void(void*, size_t count)>& work);

 private:
  struct View {
    at::Tensor tensor;
    at::Tensor buffer;
    Use use;
  };
  void begin();
  void wait_for_stream();

  std::optional<c10::Event> event_;
  std::optional<c10::Stream> stream_;
  Clock::time_point deadline_ = Clock::time_point::max();
  std::vector<View> views_;
  bool begun_ = false;
};

}  // namespace dtrain
