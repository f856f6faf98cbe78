#include "engine.h"

#include <dlfcn.h>
#include <sched.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <thread>

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace dtrain {

namespace {

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return std::string(text, length);
}

/// Some builds of Open MPI load plug-ins that look for the library's symbols in the global scope, where an extension
/// that Python has loaded does not put them.
void make_symbols_global() {
#ifdef RTLD_NOLOAD
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) != 0 && info.dli_fname != nullptr) {
    dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  }
#endif
}

thread_local bool has_mpi = false;
thread_local bool waits = false;

/// A short sleep is as short as it is asked for; the system makes it 50 us longer otherwise.
void sleep_exactly() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
#endif
}

}  // namespace

MpiError::MpiError(int code, const std::string& call) : std::runtime_error(call + " failed: " + error_text(code)) {
  MPI_Error_class(code, &error_class_);
}

void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) throw MpiError(code, call);
}

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string line(text, length);
  line.resize(std::min(line.find_first_of("\n\0"), line.size()));
  auto comma = line.find(", package:");  // Open MPI adds who built it and where
  return comma == std::string::npos ? line : line.substr(0, comma);
}

bool mpi_is_cuda_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT) && MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int yes = 0;
  return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &yes) == MPI_SUCCESS && yes != 0;
#else
  return false;
#endif
}

Backoff::Backoff() : awake_(Engine::caller_waits() ? 10000 : 500) {}

std::chrono::microseconds Backoff::sleep_time() {
  ++turns_;
  if (turns_ < awake_) return std::chrono::microseconds(0);
  return std::chrono::microseconds(turns_ < awake_ + 1500 ? 20 : 200);
}

void Backoff::pause() {
  auto time = sleep_time();
  if (time.count() > 0) {
    std::this_thread::sleep_for(time);
  } else if (turns_ < 50) {
    relax();
  } else {
    sched_yield();
  }
}

Engine& Engine::instance() {
  static Engine* engine = new Engine();
  return *engine;
}

void Engine::start(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(start_mutex_);
  if (state_ == State::running) return require_running();
  if (state_ != State::idle) {
    throw std::runtime_error(state_ == State::starting
                                 ? "MPI did not start in an earlier attempt; start a new process"
                                 : "MPI was shut down in this process and cannot be started again");
  }
  state_ = State::starting;
  process_ = static_cast<int>(getpid());
  std::promise<void> started;
  auto result = started.get_future();
  std::thread(&Engine::loop, this, std::move(started)).detach();
  if (result.wait_for(timeout) != std::future_status::ready) {
    throw std::runtime_error("MPI_Init did not return within " + std::to_string(timeout.count() / 1000) +
                             " s: is a process of this job missing, or a host out of reach?");
  }
  result.get();
}

void Engine::require_running() const {
  if (state_ != State::running) {
    throw std::runtime_error(state_ == State::stopped ? "MPI was already shut down in this process"
                                                      : "MPI is not started in this process; call init() first");
  }
  if (process_ != static_cast<int>(getpid())) {
    throw std::runtime_error("MPI was started in process " + std::to_string(process_) +
                             ", of which this one is a fork; a forked process cannot use it");
  }
}

void Engine::initialise() {
  make_symbols_global();
  int initialised = 0, finalised = 0, provided = MPI_THREAD_SINGLE;
  MPI_Finalized(&finalised);
  if (finalised) throw std::runtime_error("MPI was already finalised in this process");
  MPI_Initialized(&initialised);
  if (!initialised) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    own_mpi_ = true;
  } else {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_SERIALIZED) {
      throw std::runtime_error(
          "MPI was started by another library of this process without support for threads; start it with "
          "MPI_THREAD_SERIALIZED or more (mpi4py: mpi4py.rc.thread_level = 'multiple'), or let this library start it");
    }
  }
  any_thread_ = provided >= MPI_THREAD_SERIALIZED;
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &size_);
  MPI_Comm local = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(world_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &local), "MPI_Comm_split_type");
  MPI_Comm_rank(local, &local_rank_);
  MPI_Comm_size(local, &local_size_);
  host_ = rank_;
  check_mpi(MPI_Bcast(&host_, 1, MPI_INT, 0, local), "MPI_Bcast");
  MPI_Comm_free(&local);
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  int length = 0;
  if (MPI_Get_processor_name(name, &length) == MPI_SUCCESS) host_name_.assign(name, length);
  notices_.open(world_);
}

bool Engine::is_this_thread() { return has_mpi; }

bool Engine::caller_waits() { return waits; }

void Engine::loop(std::promise<void> started) {
  has_mpi = true;
  sleep_exactly();
  try {
    initialise();
    state_ = State::running;
    started.set_value();
  } catch (...) {
    started.set_exception(std::current_exception());
    return;
  }
  Backoff backoff;
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      taken_ = false;
      wake_.wait(lock, [this] { return !taken_ && !idle(); });
      // From here on nobody else takes MPI: that needs the engine to be idle.
      auto new_work = [this] { return !tasks_.empty() || !waiting_transfers_.empty() || stop_; };
      if (!new_work()) {  // transfers under way: looked at ever less often
        auto time = backoff.sleep_time();
        if (time.count() > 0) wake_.wait_for(lock, time, new_work);
      }
      taken_ = true;
      if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      } else if (stop_) {
        break;
      }
    }
    auto begin = Clock::now();
    progress();
    if (task) {
      task();
      task = nullptr;
      backoff.reset();
      statistics_.busy_nanoseconds += std::chrono::nanoseconds(Clock::now() - begin).count();
    }
  }
  finalise();
}

bool Engine::idle() const {
  return tasks_.empty() && waiting_transfers_.empty() && transfers_.empty() && !stop_;
}

bool Engine::run_here(const std::function<void()>& task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!any_thread_ || taken_ || !idle()) return false;
    taken_ = true;
  }
  has_mpi = waits = true;
  task();
  has_mpi = waits = false;
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ = false;
  if (!idle()) wake_.notify_one();
  return true;
}

void Engine::finalise() {
  if (!failed_) {
    notices_.close();
    int finalised = 0;
    if (own_mpi_ && MPI_Finalized(&finalised) == MPI_SUCCESS && !finalised) MPI_Finalize();
  }
  stopped_.set_value();
}

void Engine::submit(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void Engine::submit(std::shared_ptr<Transfer> transfer) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_transfers_.push_back(std::move(transfer));
    transfers_waiting_ = true;
  }
  wake_.notify_one();
}

void Engine::call(std::function<void()> task, std::chrono::milliseconds timeout, const std::string& what) {
  require_running();
  auto done = std::make_shared<std::promise<void>>();
  auto result = done->get_future();
  submit([done, task = std::move(task)] {
    try {
      task();
      done->set_value();
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  });
  if (result.wait_for(timeout) != std::future_status::ready) {
    mark_failed();
    throw std::runtime_error(what + " did not end within " + std::to_string(timeout.count() / 1000) + " s on rank " +
                             std::to_string(rank_) + ": another rank does not take part, or has died");
  }
  result.get();
}

void Engine::progress() {
  // A transfer that waits for the device calls this too: it must not be started, ended or freed inside itself.
  if (progressing_) return;
  progressing_ = true;
  auto reset = [this](void*) { progressing_ = false; };
  std::unique_ptr<void, decltype(reset)> guard(this, reset);
  if (transfers_waiting_.load(std::memory_order_relaxed)) {
    std::deque<std::shared_ptr<Transfer>> started;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      started.swap(waiting_transfers_);
      transfers_waiting_ = false;
    }
    for (auto& transfer : started) {
      transfer->start();
      transfers_.push_back(std::move(transfer));
    }
  }
  if (transfers_.empty()) return;
  transfers_.erase(
      std::remove_if(transfers_.begin(), transfers_.end(), [](const auto& transfer) { return transfer->poll(); }),
      transfers_.end());
}

bool Engine::shutdown(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(start_mutex_);
  if (state_ != State::running || process_ != static_cast<int>(getpid())) return !failed_;
  auto stopped = stopped_.get_future();
  {
    std::lock_guard<std::mutex> queue(mutex_);
    stop_ = true;
  }
  state_ = State::stopped;
  wake_.notify_one();
  return stopped.wait_for(timeout) == std::future_status::ready && !failed_;
}

}  // namespace dtrain
