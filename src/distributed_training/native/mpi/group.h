// A process group: who is on which host, and which way each collective takes.
//
//   one host                  through shared memory (HostMemory)
//   several hosts             all-reduce, broadcast and barrier first inside the host through shared memory, then one
//   stream
//                             per host over MPI; the others straight over MPI
//   one rank a host, or no
//   shared memory to be had   over MPI
//
// A failure breaks the group: every later operation fails at once with the first reason, and the other ranks are told,
// so that they need not wait for their own deadline. Collectives belong to the communication thread; those of a group
// on one host (`in_memory()`) touch no MPI and may run in any one thread at a time.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel.h"
#include "codec.h"
#include "engine.h"
#include "reduce.h"

namespace dtrain {

class HostMemory;
struct Waiting;

struct GroupSettings {
  std::string name;
  int rank = 0;
  int size = 1;
  std::vector<int> names;  // how messages call the ranks: their ranks in the job
  std::chrono::milliseconds timeout{0};
  int ranks_per_host = 0;  // pretend that so many ranks make a host; 0: as it is
  bool shared_memory = true;
};

/// A group that an earlier failure has broken, here or on another rank.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  using Timeout = std::chrono::milliseconds;

  /// Called by all members, each with the ranks that the members have in MPI_COMM_WORLD.
  static std::shared_ptr<Group> create(const GroupSettings& settings, const std::vector<int>& world_ranks);

  ~Group();

  int rank() const { return settings_.rank; }
  int size() const { return settings_.size; }
  const std::string& name() const { return settings_.name; }
  int name_of_rank(int rank) const { return settings_.names[rank]; }
  int hosts() const { return hosts_; }
  int ranks_per_host() const { return static_cast<int>(local_.size()); }
  bool shared_memory() const { return memory_ != nullptr; }
  const std::string& why_not() const { return why_not_; }
  /// Whether the collectives that need no peer-to-peer messages stay within this host's memory.
  bool in_memory() const { return memory_ && hosts_ == 1; }
  MPI_Comm transfers() const { return transfers_; }

  void allreduce(void* data, size_t count, Dtype dtype, Op op, Timeout timeout);
  void allreduce_compressed(float* data, size_t count, Wire wire, bool average, Timeout timeout);
  void reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, Timeout timeout);
  void allgather(const void* input, void* const* outputs, size_t bytes, Timeout timeout);
  void broadcast(void* data, size_t bytes, int root, Timeout timeout);
  void barrier(Timeout timeout);
  void alltoall(const std::vector<Channel::Piece>& sends, const std::vector<Channel::Piece>& receives, Timeout timeout);
  void gather(const void* input, void* const* outputs, size_t bytes, int root, Timeout timeout);
  void scatter(const void* const* inputs, void* output, size_t bytes, int root, Timeout timeout);

  /// Runs one operation. What it throws comes out as an error that names the operation, its number, the group and this
  /// rank, and breaks the group unless it was a mistake in the arguments.
  void run(const std::string& what, uint64_t sequence, const std::function<void()>& operation);
  /// Breaks the group and tells the others. Any thread; the first reason counts.
  void fail(const std::string& reason);
  /// Why the group is broken; empty if it is not.
  std::string failure() const;
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  /// Throws Broken if the group is broken, also by the word of another rank. Communication thread only.
  void check();

 private:
  Group();
  void connect(const std::vector<int>& world_ranks);
  void find_hosts();
  void share_memory();
  void watch_for_notices();
  void send_notices(const std::string& reason);
  void keep_for_ever();
  Waiting waiting(Timeout timeout) const;
  Clock::time_point deadline(Timeout timeout, bool between_hosts = true) const;

  GroupSettings settings_;
  MPI_Comm comm_ = MPI_COMM_NULL, transfers_ = MPI_COMM_NULL;
  int hosts_ = 1;
  std::vector<int> host_of_;  // of each rank: the number of its host
  std::vector<int> leader_;   // of each host: the rank that speaks for it
  std::vector<int> local_;    // ranks of this host
  std::string why_not_;
  std::unique_ptr<HostMemory> memory_;
  std::unique_ptr<Channel> everybody_, leaders_;

  mutable std::mutex mutex_;
  std::atomic<bool> broken_{false};
  std::string reason_;
  MPI_Request notice_ = MPI_REQUEST_NULL;
  std::vector<char> notice_in_;
};

}  // namespace dtrain
