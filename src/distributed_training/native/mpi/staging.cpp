#include "staging.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <thread>

namespace dtrain {

namespace {

/// One stream for each device, of high priority, so that copies do not queue behind the training's own work.
c10::Stream copy_stream(c10::Device device) {
  static std::mutex mutex;
  static auto streams = new std::map<c10::DeviceIndex, c10::Stream>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams->find(device.index());
  if (found == streams->end()) {
    c10::impl::VirtualGuardImpl guard(device.type());
    found = streams->emplace(device.index(), guard.getStreamFromGlobalPool(device, true)).first;
  }
  return found->second;
}

at::Tensor pinned_like(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return at::empty(sizes,
                   tensor.options().device(c10::kCPU).pinned_memory(true).memory_format(c10::MemoryFormat::Contiguous));
}

}  // namespace

Stage::Stage(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.device().is_cpu()) continue;
    if (stream_ && stream_->device() != tensor.device()) {
      throw std::invalid_argument("the tensors of one operation are on different devices");
    }
    if (stream_) continue;
    c10::impl::VirtualGuardImpl guard(tensor.device().type());
    stream_ = copy_stream(tensor.device());
    event_.emplace(tensor.device().type());
    event_->record(guard.getStream(tensor.device()));
  }
}

Stage::~Stage() {
  // Not given back: the operation failed. A peer's late message may still be written into these buffers, so they stay.
  for (auto& view : views_) {
    if (view.buffer.defined()) new at::Tensor(std::move(view.buffer));
  }
}

void Stage::begin() {
  if (begun_ || !event_) return;
  begun_ = true;
  event_->block(*stream_);
}

void Stage::wait_for_stream() {
  c10::Event done(stream_->device_type());
  done.record(*stream_);
  Backoff backoff;
  while (!done.query()) {
    if (Engine::is_this_thread()) Engine::instance().progress();
    if (Clock::now() > deadline_)
      throw std::runtime_error("the device has not finished the work before this operation in time");
    backoff.pause();
  }
}

void* Stage::host(const at::Tensor& tensor, Use use) {
  if (tensor.device().is_cpu() && tensor.is_contiguous()) return tensor.data_ptr();
  at::NoGradGuard no_grad;
  View view{tensor, at::Tensor(), use};
  if (tensor.device().is_cpu()) {
    view.buffer = use == Use::write ? at::empty(tensor.sizes(), tensor.options()) : tensor.contiguous();
  } else {
    begin();
    c10::StreamGuard guard(*stream_);
    view.buffer = pinned_like(tensor, tensor.sizes());
    if (use != Use::write) view.buffer.copy_(tensor, /*non_blocking=*/true);
  }
  views_.push_back(std::move(view));
  return views_.back().buffer.data_ptr();
}

void* Stage::place(const at::Tensor& tensor, Use use, bool takes_device_memory) {
  if (!takes_device_memory || tensor.device().is_cpu() || !tensor.is_contiguous()) return host(tensor, use);
  begin();
  return tensor.data_ptr();
}

void Stage::fetch() {
  if (begun_) wait_for_stream();
}

void Stage::give_back() {
  at::NoGradGuard no_grad;
  c10::OptionalStreamGuard guard(stream_);
  for (auto& view : views_) {
    if (view.use != Use::read) view.tensor.copy_(view.buffer, /*non_blocking=*/true);
  }
  if (begun_) wait_for_stream();
  views_.clear();
}

void Stage::in_pieces(const at::Tensor& tensor, size_t piece_bytes, const std::function<void(void*, size_t)>& work) {
  at::NoGradGuard no_grad;
  begin();
  c10::StreamGuard guard(*stream_);
  at::Tensor whole = tensor.contiguous();
  at::Tensor flat = whole.view({-1});
  const int64_t piece = std::max<int64_t>(1, static_cast<int64_t>(piece_bytes / tensor.element_size()));
  const int64_t pieces = (flat.numel() + piece - 1) / piece;
  constexpr int kBuffers = 3;
  std::vector<c10::Event> arrived;
  for (int i = 0; i < kBuffers; ++i) {
    views_.push_back({at::Tensor(), pinned_like(tensor, {std::min(piece, flat.numel())}), Use::read});
    arrived.emplace_back(stream_->device_type());
  }
  auto part = [&](int64_t i) { return flat.narrow(0, i * piece, std::min(piece, flat.numel() - i * piece)); };
  auto fetch_piece = [&](int64_t i) {
    if (i >= pieces) return;
    auto from = part(i);
    views_[i % kBuffers].buffer.narrow(0, 0, from.numel()).copy_(from, true);
    arrived[i % kBuffers].record(*stream_);
  };
  fetch_piece(0);
  for (int64_t i = 0; i < pieces; ++i) {
    fetch_piece(i + 1);  // before this piece's way back is queued: the stream works in order
    Backoff backoff;
    while (!arrived[i % kBuffers].query()) {
      if (Clock::now() > deadline_)
        throw std::runtime_error("the device has not finished the work before this operation in time");
      backoff.pause();
    }
    auto to = part(i);
    auto buffer = views_[i % kBuffers].buffer.narrow(0, 0, to.numel());
    work(buffer.data_ptr(), static_cast<size_t>(to.numel()));
    to.copy_(buffer, true);
  }
  if (!whole.is_same(tensor)) tensor.copy_(whole, true);
  wait_for_stream();
  views_.clear();
}

}  // namespace dtrain
