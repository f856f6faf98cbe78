#include "work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace dtrain {

namespace {

/// Threads that run the callbacks of futures. A callback may wait for another operation, whose own callbacks then need
/// another thread: there are as many as are in use at a time, and they stay for the next.
class Callbacks {
 public:
  static Callbacks& instance() {
    static Callbacks* callbacks = new Callbacks();  // never destroyed: its threads may outlive everything
    return *callbacks;
  }

  void post(std::function<void()> callback) {
    bool grow = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(callback));
      grow = idle_ < queue_.size();
    }
    if (grow) {
      std::thread(&Callbacks::serve, this).detach();
    } else {
      wake_.notify_one();
    }
  }

 private:
  void serve() {
    pthread_setname_np(pthread_self(), "dtrain_callback");  // runtime/native_threads.py looks for it
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (!queue_.empty()) {
        auto callback = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        callback();
        callback = nullptr;
        lock.lock();
      }
      if (idle_ >= kMostIdle) return;
      ++idle_;
      wake_.wait(lock, [this] { return !queue_.empty(); });
      --idle_;
    }
  }

  static constexpr size_t kMostIdle = 4;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;
};

}  // namespace

MpiWork::MpiWork(int rank, c10d::OpType type, const char* title, uint64_t sequence, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor> kept, std::chrono::milliseconds timeout)
    : c10d::Work(
          rank, type, title,
          kept.empty() ? std::optional<std::vector<at::Tensor>>() : std::optional<std::vector<at::Tensor>>(kept)),
      sequence_(sequence),
      outputs_(std::move(outputs)),
      kept_(std::move(kept)),
      timeout_(timeout) {}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);  // ends: the communication thread ends every operation at its deadline
  } else if (!cv_.wait_for(lock, timeout, done)) {
    C10_THROW_ERROR(DistBackendError, "operation " + std::to_string(sequence_) + " was not done within the " +
                                          std::to_string(timeout.count()) + " ms that its caller would wait");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void MpiWork::complete(const std::exception_ptr& error) {
  finish(error);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<at::Tensor> value;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // After a failure a message that was given up may still arrive in these tensors: they are never freed.
    if (error) new std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>(kept_, outputs_);
    kept_.clear();
    future = std::move(future_);
    future_ = nullptr;
    if (future) value = outputs_;
  }
  if (!future) return;
  Callbacks::instance().post([future, value, stream = stream_, error] { fulfil(future, value, stream, error); });
}

void MpiWork::fulfil(const c10::intrusive_ptr<c10::ivalue::Future>& future, const std::vector<at::Tensor>& value,
                     const std::optional<c10::Stream>& stream, const std::exception_ptr& error) {
  c10::OptionalStreamGuard guard(stream);
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(value));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (future_) return future_;
  std::vector<c10::Device> devices;
  for (const auto& tensor : outputs_) {
    if (!tensor.device().is_cpu() && (devices.empty() || devices.back() != tensor.device())) {
      devices.push_back(tensor.device());
    }
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  if (!completed_) {
    future_ = future;
    return future;
  }
  lock.unlock();
  fulfil(future, outputs_, stream_, exception_);
  return future;
}

}  // namespace dtrain
