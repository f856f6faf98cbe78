// A process group: who is on which host, and which way each collective takes.
//
//   one host                  through shared memory (HostMemory)
//   several hosts             all-reduce, broadcast and barrier first inside the host through shared memory, then one
//                             stream per host over MPI; the others straight over MPI
//   one rank a host, or no
//   shared memory to be had   over MPI
//
// A failure breaks the group: every later operation fails at once with the first reason, and the other ranks are told,
// so that they need not wait for their own deadline. Calls that differ between ranks are such a failure (calls.h).
// Collectives belong to whoever has MPI (engine.h); those of a group on one host (`in_memory()`) touch no MPI and may run
// in any one thread at a time.
//
// group.cpp has the collectives, group_making.cpp how it comes to be and ends, group_failures.cpp what goes wrong.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "calls.h"
#include "channel.h"
#include "codec.h"
#include "communicators.h"
#include "engine.h"
#include "notices.h"
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

class Group : public Listener, public std::enable_shared_from_this<Group> {
 public:
  using Timeout = std::chrono::milliseconds;

  /// Called by all members, each with the ranks that the members have in MPI_COMM_WORLD.
  static std::shared_ptr<Group> create(const GroupSettings& settings, const std::vector<int>& world_ranks);

  ~Group() override;

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
  MPI_Comm transfers() const { return comms_.transfers; }
  /// Counts a tensor that was sent or received over transfers().
  void count_transfer(bool sent) { ++(sent ? comms_.sent : comms_.received); }

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
  /// Throws Broken if the group is broken, also by the word of another rank. Only for whoever has MPI.
  void check();
  void hear(const Notice& notice) override;

 private:
  Group();
  void connect();
  void find_hosts();
  void share_memory();
  /// Counts a call in. Throws Differs if another rank is known to have called something else.
  void begin(Call::Kind kind, size_t count, int root = -1);
  void begin(Call::Kind kind, size_t count, Dtype dtype, Op op, uint8_t wire = 255);
  void begin(const Call& call);
  /// For waits inside a collective: what else there is to do meanwhile. Throws Broken.
  void look();
  /// The same, asked for by a thread that waits without having MPI.
  void look_soon();
  void send_notices(const Notice& notice);
  std::string explain(const Calls::Other& other) const;
  void keep_for_ever();
  /// An all-reduce that is part of a call already counted.
  void reduce(void* data, size_t count, Dtype dtype, Op op, Timeout timeout);
  Waiting waiting(Timeout timeout) const;
  Clock::time_point deadline(Timeout timeout, bool between_hosts = true) const;

  GroupSettings settings_;
  Communicators comms_;
  int hosts_ = 1;
  std::vector<int> host_of_;  // of each rank: the number of its host
  std::vector<int> leader_;   // of each host: the rank that speaks for it
  std::vector<int> local_;    // ranks of this host
  std::string why_not_;
  Calls calls_;
  std::unique_ptr<HostMemory> memory_;
  std::unique_ptr<Channel> everybody_, leaders_;

  mutable std::mutex mutex_;
  std::atomic<bool> broken_{false};
  std::string reason_;
  std::atomic<bool> look_asked_{false};
};

}  // namespace dtrain
