#include "segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>
#include <random>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace dtrain {
namespace {

using Clock = Waiting::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x31'6d'65'6d'74'73'6f'68;
constexpr auto kAliveEvery = milliseconds(100);
constexpr auto kPause = microseconds(20);   // spinning with the processor's own pause
constexpr auto kYield = microseconds(150);  // then giving way to others, before sleeping

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::string reason_of(const char* what, int error) { return std::string(what) + ": " + std::strerror(error); }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleep until the bell changes or the time is over; waking for no reason is allowed.
void sleep_on(std::atomic<uint32_t>& bell, uint32_t seen, Clock::duration time) {
  const auto nanoseconds = std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  timespec limit{};
  limit.tv_sec = nanoseconds / 1000000000;
  limit.tv_nsec = nanoseconds % 1000000000;
#if defined(__linux__)
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  if (bell.load() == seen) {
    limit = {0, static_cast<long>(std::min<int64_t>(nanoseconds, 50000))};
    ::nanosleep(&limit, nullptr);
  }
#endif
}

#if defined(__linux__)
// Without a name in any folder: the others open it through this process, and it ends with its last user.
int make_unnamed() {
#if defined(SYS_memfd_create)
  return static_cast<int>(::syscall(SYS_memfd_create, "dtrain", 1U /* close on exec */));
#else
  errno = ENOSYS;
  return -1;
#endif
}
#endif

}  // namespace

Segment::Segment(const std::string& name, int rank, int ranks, const HostMemorySettings& settings)
    : name_(name), rank_(rank), ranks_(ranks), named_(settings.named), names_(settings.names), visible_(ranks, false) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw std::invalid_argument("local rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                                " does not exist");
  }
  // Every rank's part of a chunk has at least a cache line.
  chunk_bytes_ = round_up(std::max(settings.chunk_bytes, static_cast<size_t>(ranks) * 64), kPage);
  piece_bytes_ = round_up(settings.between_hosts_bytes, kPage);
  const size_t slots = round_up(sizeof(SegmentHeader), kPage) + round_up(ranks * sizeof(RankBlock), kPage);
  bytes_ = slots + ranks * kSlots * chunk_bytes_ + kSlots * piece_bytes_;
  try {
    name_.empty() ? make() : open();
  } catch (...) {
    close_file();
    throw;
  }
  enter();
}

Segment::~Segment() {
  if (header_ != nullptr) {
    mine().left.store(1, std::memory_order_release);
    wake(mine());
    ::munmap(header_, bytes_);
  }
  close_file();
}

void Segment::make() {
  const std::string hint = "; the ranks of this host cannot share memory";
#if defined(__linux__)
  if (!named_) {
    file_ = make_unnamed();
    if (file_ >= 0) name_ = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file_);
  }
#endif
  if (file_ < 0) {
    named_ = true;
    std::random_device random;
    char text[64];
    std::snprintf(text, sizeof text, "/dtrain-%d-%08x%08x", static_cast<int>(::getpid()), random(), random());
    file_ = ::shm_open(text, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file_ < 0) throw Unavailable(reason_of("making shared memory failed", errno) + hint);
    name_ = text;
  }
  int error;
  do {
    error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes_));
  } while (error == EINTR);
  if (error != 0) {
    throw Unavailable(
        reason_of(("taking " + std::to_string(bytes_ / 1024) + " KB of shared memory failed").c_str(), error) + hint +
        " (is /dev/shm too small? containers take --shm-size)");
  }
  map(file_);
  header_->ranks = ranks_;
  header_->chunk_bytes = chunk_bytes_;
  header_->between_hosts_bytes = piece_bytes_;
  header_->magic = kMagic;
}

void Segment::open() {
  named_ = false;
  const bool unnamed = name_.compare(0, 6, "/proc/") == 0;
  file_ = unnamed ? ::open(name_.c_str(), O_RDWR | O_CLOEXEC) : ::shm_open(name_.c_str(), O_RDWR, 0600);
  const std::string which = "the shared memory '" + name_ + "' made by " + title(0);
  if (file_ < 0) throw Unavailable(reason_of((title(rank_) + " cannot open " + which).c_str(), errno));
  struct stat status {};
  if (::fstat(file_, &status) != 0 || static_cast<size_t>(status.st_size) != bytes_) {
    throw Unavailable(which + " has " + std::to_string(status.st_size) + " bytes, " + title(rank_) + " expects " +
                      std::to_string(bytes_) + ": give all ranks of a host the same settings");
  }
  map(file_);
  if (header_->magic != kMagic || header_->ranks != static_cast<uint64_t>(ranks_) ||
      header_->chunk_bytes != chunk_bytes_ || header_->between_hosts_bytes != piece_bytes_) {
    ::munmap(header_, bytes_);
    header_ = nullptr;
    throw Unavailable(which + " is for other settings: give all ranks of a host the same settings");
  }
}

void Segment::map(int file) {
  int flags = MAP_SHARED;
#if defined(MAP_POPULATE)
  flags |= MAP_POPULATE;
#endif
  void* start = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, file, 0);
  if (start == MAP_FAILED) throw Unavailable(reason_of("mapping shared memory failed", errno));
#if defined(MADV_HUGEPAGE)
  ::madvise(start, bytes_, MADV_HUGEPAGE);
#endif
  // Fresh shared memory is zero, which is what all of these begin with.
  auto* bytes = static_cast<uint8_t*>(start);
  header_ = reinterpret_cast<SegmentHeader*>(bytes);
  blocks_ = reinterpret_cast<RankBlock*>(bytes + round_up(sizeof(SegmentHeader), kPage));
  slots_ = reinterpret_cast<uint8_t*>(blocks_) + round_up(ranks_ * sizeof(RankBlock), kPage);
  pieces_ = slots_ + ranks_ * kSlots * chunk_bytes_;
}

void Segment::enter() {
  usable_processors(mine().processors);
  mine().started.store(process_start(::getpid()));
  mine().pid.store(::getpid());
  raise(&RankBlock::filled, 1);
}

void Segment::close_file() {
  if (file_ >= 0) ::close(file_);
  if (named_ && !name_.empty() && file_ >= 0) ::shm_unlink(name_.c_str());
  file_ = -1;
}

void Segment::ready(const Waiting& waiting) {
  Signature call;
  wait(&RankBlock::filled, 1, everybody(), call, waiting);
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint64_t started = blocks_[rank].started.load();
    visible_[rank] = started != 0 && process_start(blocks_[rank].pid.load()) == started;
  }
  // Together they may use the processors that any of them may use: launchers often give each rank one of its own.
  int processors = 0;
  for (int word = 0; word < kProcessorWords; ++word) {
    uint64_t bits = 0;
    for (int rank = 0; rank < ranks_; ++rank) bits |= blocks_[rank].processors[word];
    processors += __builtin_popcountll(bits);
  }
  crowded_ = processors != 0 && ranks_ > processors;
  close_file();
}

void Segment::raise(Counter RankBlock::*counter, uint64_t value) {
  RankBlock& block = mine();
  (block.*counter).store(value, std::memory_order_release);
  // Either this sees the sleeper, or the sleeper sees the counter: both fence between their store and their load.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (block.sleepers.load(std::memory_order_relaxed) != 0) wake(block);
}

void Segment::wake(RankBlock& block) const noexcept {
  block.bell.fetch_add(1, std::memory_order_release);
#if defined(__linux__)
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&block.bell), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

void Segment::wait(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call,
                   const Waiting& waiting, const std::function<void()>& meanwhile) const {
  for (int rank = peers.begin; rank < peers.end; ++rank) {
    if (rank == rank_ || arrived(counter, value, rank) || spin(counter, value, rank)) continue;
    sleep(counter, value, rank, peers, call, waiting, meanwhile);
  }
}

bool Segment::wait_shortly(Counter RankBlock::*counter, uint64_t value, microseconds time) const {
  const auto end = Clock::now() + time;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    while (!arrived(counter, value, rank)) {
      if (Clock::now() >= end) return false;
      if (crowded_) ::sched_yield();
      for (int turn = 0; turn < 16 && !arrived(counter, value, rank); ++turn) pause();
    }
  }
  return true;
}

bool Segment::spin(Counter RankBlock::*counter, uint64_t value, int rank) const {
  const auto start = Clock::now();
  const auto pause_until = start + (crowded_ ? microseconds(1) : kPause);
  const auto yield_until = start + kYield;
  for (auto now = start; now < yield_until; now = Clock::now()) {
    if (now >= pause_until) ::sched_yield();
    for (int turn = 0; turn < 16; ++turn) {
      if (arrived(counter, value, rank)) return true;
      pause();
    }
  }
  return false;
}

void Segment::sleep(Counter RankBlock::*counter, uint64_t value, int rank, Peers peers, const Signature& call,
                    const Waiting& waiting, const std::function<void()>& meanwhile) const {
  RankBlock& block = blocks_[rank];
  auto now = Clock::now();
  auto next_poll = waiting.poll ? now : Clock::time_point::max();
  auto next_check = now + kAliveEvery;
  while (!arrived(counter, value, rank)) {
    if (meanwhile) meanwhile();
    throw_if_aborted();
    check_left(counter, value, peers, call);
    now = Clock::now();
    if (now >= waiting.deadline) throw_timed_out(counter, value, peers, call);
    if (now >= next_poll) {
      waiting.poll();
      next_poll = Clock::now() + waiting.poll_every;
    }
    if (now >= next_check) {
      check_alive(counter, value, peers, call);
      next_check = now + kAliveEvery;
    }
    const auto until = std::min({next_poll, next_check, waiting.deadline});
    block.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t seen = block.bell.load(std::memory_order_acquire);
    if (!arrived(counter, value, rank)) sleep_on(block.bell, seen, until - Clock::now());
    block.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Segment::throw_timed_out(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const {
  std::vector<int> missing;
  std::string list;
  for (int rank = peers.begin; rank < peers.end; ++rank) {
    if (rank == rank_ || arrived(counter, value, rank)) continue;
    missing.push_back(rank);
    list += (list.empty() ? "" : ", ") + title(rank) + " (process " + std::to_string(blocks_[rank].pid.load()) + ")";
  }
  throw TimedOut(title(rank_) + " waited in " + call.text() + " until the deadline for " + list +
                     ", alive but not there; see what it is doing, or give the group a longer timeout",
                 missing);
}

void Segment::check_alive(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const {
  for (int rank = peers.begin; rank < peers.end; ++rank) {
    if (rank == rank_ || !visible_[rank] || arrived(counter, value, rank)) continue;
    const int pid = blocks_[rank].pid.load();
    if (process_start(pid) == blocks_[rank].started.load() || arrived(counter, value, rank)) continue;
    throw PeerDied("the process " + std::to_string(pid) + " of " + title(rank) + " has ended while " + title(rank_) +
                       " waited for it in " + call.text() + "; the cause is in the log of " + title(rank),
                   rank, pid);
  }
}

void Segment::check_left(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const {
  for (int rank = peers.begin; rank < peers.end; ++rank) {
    if (rank == rank_ || blocks_[rank].left.load(std::memory_order_acquire) == 0) continue;
    if (arrived(counter, value, rank)) continue;
    throw PeerDied(title(rank) + " closed the group while " + title(rank_) + " waited for it in " + call.text() +
                       ": not all ranks made the same calls",
                   rank, blocks_[rank].pid.load());
  }
}

void Segment::abort(const std::string& reason) noexcept {
  if (header_->abort_claimed.exchange(1) == 0) {
    const size_t length = std::min(reason.size(), sizeof header_->reason - 1);
    std::memcpy(header_->reason, reason.data(), length);
    header_->reason[length] = 0;
    header_->aborted_by.store(rank_ + 1, std::memory_order_release);
  }
  for (int rank = 0; rank < ranks_; ++rank) wake(blocks_[rank]);
}

void Segment::throw_if_aborted() const {
  const int by = header_->aborted_by.load(std::memory_order_acquire) - 1;
  if (by < 0) return;
  const std::string reason = header_->reason;
  throw Aborted(title(by) + " ended communication: " + reason, by, reason);
}

std::string Segment::title(int rank) const {
  const auto index = static_cast<size_t>(rank);
  return "rank " + std::to_string(index < names_.size() ? names_[index] : rank);
}

}  // namespace dtrain
