// The communication thread, and whose turn it is to call MPI: one thread of a process has it at a time. That is the
// communication thread, except while it has nothing to do: then a caller who would only wait for his operation may do it
// himself, which saves waking two threads.
//
// Collectives are tasks that run one after the other, in the order in which they were submitted. Sends and receives are
// transfers: they are started in their own order as soon as the thread looks (also while a collective waits for its
// peers) and are polled until they are done, so that a receive never stands in the way of the collective that its
// sender is in. Nothing here waits in MPI: requests are polled, so that every wait can have a deadline and can be given
// up.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "communicators.h"
#include "notices.h"

namespace dtrain {

using Clock = std::chrono::steady_clock;

/// An MPI call that failed: which, and the library's own words.
class MpiError : public std::runtime_error {
 public:
  MpiError(int code, const std::string& call);
  int error_class() const { return error_class_; }

 private:
  int error_class_ = 0;
};

/// Throws MpiError unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// Tells the processor that this is a loop that waits.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A send or a receive under way. All methods run in the thread that has MPI and never throw.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void start() = 0;
  /// Looks whether it is done, failed, or out of time; true when nothing is left to do.
  virtual bool poll() = 0;
};

/// Pauses between two looks at something that will come soon: first none, then the processor is given away, then sleep.
/// The communication thread shares its processor with the computation and sleeps early; a caller who has nothing else to
/// do (Engine::caller_waits()) goes on looking for longer.
class Backoff {
 public:
  Backoff();
  void pause();
  void reset() { turns_ = 0; }
  /// How long the next pause should sleep; zero: it need not.
  std::chrono::microseconds sleep_time();

 private:
  unsigned awake_, turns_ = 0;
};

struct Statistics {
  std::atomic<uint64_t> operations{0};
  std::atomic<uint64_t> inline_operations{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> busy_nanoseconds{0};
  std::atomic<int64_t> communicators{0};  // of groups, not freed yet
};

class Engine {
 public:
  /// The engine of this process. Never destroyed: a thread stuck in a library must not keep the process from leaving.
  static Engine& instance();

  /// Starts the thread and MPI in it. Doing it again is harmless. Throws if MPI cannot start within `timeout`.
  void start(std::chrono::milliseconds timeout);
  bool running() const { return state_ == State::running; }
  /// Throws unless the engine runs in this very process (a forked child has no communication thread).
  void require_running() const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  /// The same number for all processes of one host, different for those of others.
  int host() const { return host_; }
  const std::string& host_name() const { return host_name_; }
  MPI_Comm world() const { return world_; }

  void submit(std::function<void()> task);
  void submit(std::shared_ptr<Transfer> transfer);
  /// Runs `task` in the communication thread, after all that was submitted before, and waits for its end.
  void call(std::function<void()> task, std::chrono::milliseconds timeout, const std::string& what);

  /// Runs `task` in the caller's thread, if MPI allows that and the communication thread has nothing to do. False: it
  /// was not run. `task` throws nothing.
  bool run_here(const std::function<void()>& task);

  /// For waits inside a collective: starts and polls transfers. Only where is_this_thread().
  void progress();

  /// Whether the caller has MPI: he is the communication thread, or inside run_here().
  static bool is_this_thread();

  /// Whether the caller is inside run_here().
  static bool caller_waits();

  /// Only where is_this_thread().
  Notices& notices() { return notices_; }
  PutBy& put_by() { return put_by_; }

  Statistics& statistics() { return statistics_; }

  /// From now on MPI cannot be left in good order: shutdown() will not call MPI_Finalize.
  void mark_failed() { failed_ = true; }
  bool failed() const { return failed_; }

  /// Ends MPI and the thread. True if MPI_Finalize was done (or was not ours to do).
  bool shutdown(std::chrono::milliseconds timeout);
 private:
  enum class State { idle, starting, running, stopped };

  Engine() = default;
  void loop(std::promise<void> started);
  void initialise();
  void finalise();
  bool idle() const;  // nobody has MPI and nothing is to be done; under the mutex

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::deque<std::shared_ptr<Transfer>> waiting_transfers_;
  std::atomic<bool> transfers_waiting_{false};
  std::vector<std::shared_ptr<Transfer>> transfers_;
  bool taken_ = true;         // somebody calls MPI; under the mutex. Transfers under way are his.
  bool progressing_ = false;  // his too
  bool any_thread_ = false;   // MPI may be called by one thread after the other
  std::promise<void> stopped_;
  bool stop_ = false;

  std::mutex start_mutex_;
  std::atomic<State> state_{State::idle};
  std::atomic<bool> failed_{false};
  int process_ = 0;

  MPI_Comm world_ = MPI_COMM_NULL;
  bool own_mpi_ = false;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1, host_ = 0;
  std::string host_name_;
  Statistics statistics_;
  Notices notices_;
  PutBy put_by_;
};

/// The MPI library and its version in one line; may be asked before MPI has started.
std::string mpi_library();

/// Whether the MPI library says that it can read and write device memory.
bool mpi_is_cuda_aware();

}  // namespace dtrain
