#include "group.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "host_memory.h"

namespace dtrain {

namespace {

constexpr int kNoticeTag = 32000;
constexpr int kNoticeBytes = 1024;
constexpr size_t kNameBytes = 256;
// Pieces that go between hosts: long enough for a network, short enough that the ranks of a host work meanwhile.
constexpr size_t kBetweenHosts = 4 * 1024 * 1024;

/// The rank nearest to a trouble gives up first, so that the reason that spreads is the right one: ranks that wait for
/// another host, and then those that wait for the one that waits, are given a little longer.
constexpr std::chrono::milliseconds kGrace{1500};

void check_root(int root, int size) {
  if (root < 0 || root >= size) {
    throw std::invalid_argument("root " + std::to_string(root) + " is not a rank of a group of " +
                                std::to_string(size));
  }
}

}  // namespace

Group::Group() = default;
Group::~Group() = default;

std::shared_ptr<Group> Group::create(const GroupSettings& settings, const std::vector<int>& world_ranks) {
  std::shared_ptr<Group> group(new Group());
  group->settings_ = settings;
  group->local_ = {settings.rank};
  if (settings.size == 1) return group;
  Engine::instance().call([group, world_ranks] { group->connect(world_ranks); }, settings.timeout,
                          "making the communicators of group '" + settings.name + "'");
  return group;
}

void Group::connect(const std::vector<int>& world_ranks) {
  MPI_Comm world = Engine::instance().world();
  MPI_Group all, members;
  check_mpi(MPI_Comm_group(world, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, size(), world_ranks.data(), &members), "MPI_Group_incl");
  int tag = static_cast<int>(std::hash<std::string>()(settings_.name) % 30000);
  check_mpi(MPI_Comm_create_group(world, members, tag, &comm_), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_dup(comm_, &transfers_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(transfers_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  auto poll = [this] {
    Engine::instance().progress();
    check();
  };
  everybody_.reset(new Channel(comm_, settings_.names, poll));
  find_hosts();
  if (settings_.shared_memory) share_memory();
  if (!memory_) {  // everyone is a host of his own
    hosts_ = size();
    local_ = {rank()};
  } else if (hosts_ > 1) {
    MPI_Comm leaders = MPI_COMM_NULL;
    const bool lead = local_[0] == rank();
    check_mpi(MPI_Comm_split(comm_, lead ? 0 : MPI_UNDEFINED, host_of_[rank()], &leaders), "MPI_Comm_split");
    if (lead) {
      check_mpi(MPI_Comm_set_errhandler(leaders, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      std::vector<int> names;
      for (int leader : leader_) names.push_back(settings_.names[leader]);
      leaders_.reset(new Channel(leaders, names, poll));
    }
  }
  watch_for_notices();
}

void Group::find_hosts() {
  int mine[3] = {Engine::instance().host(), settings_.ranks_per_host, settings_.shared_memory ? 1 : 0};
  std::vector<int> all(3 * size());
  check_mpi(MPI_Allgather(mine, 3, MPI_INT, all.data(), 3, MPI_INT, comm_), "MPI_Allgather");
  // The settings of rank 0 count for all: ranks with different environments must not go different ways.
  settings_.ranks_per_host = all[1];
  settings_.shared_memory = all[2] != 0;
  if (!settings_.shared_memory) why_not_ = "switched off";
  std::map<std::pair<int, int>, int> numbers;  // (host, which part of it) -> number
  std::map<int, int> seen;
  host_of_.resize(size());
  local_.clear();
  for (int i = 0; i < size(); ++i) {
    int part = settings_.ranks_per_host > 0 ? seen[all[3 * i]]++ / settings_.ranks_per_host : 0;
    auto found = numbers.emplace(std::make_pair(all[3 * i], part), static_cast<int>(numbers.size()));
    host_of_[i] = found.first->second;
    if (found.second) leader_.push_back(i);
  }
  for (int i = 0; i < size(); ++i) {
    if (host_of_[i] == host_of_[rank()]) local_.push_back(i);
  }
  hosts_ = static_cast<int>(leader_.size());
}

void Group::share_memory() {
  if (hosts_ == size()) {
    why_not_ = "one rank on each host";
    return;
  }
  HostMemorySettings settings;
  if (hosts_ > 1) settings.between_hosts_bytes = kBetweenHosts;
  for (int rank : local_) settings.names.push_back(settings_.names[rank]);
  const int local_rank = static_cast<int>(std::find(local_.begin(), local_.end(), rank()) - local_.begin());
  const int ranks = static_cast<int>(local_.size());
  std::vector<char> mine(kNameBytes, 0), all(kNameBytes * size(), 0);
  if (local_rank == 0) {
    try {
      memory_ = HostMemory::create(ranks, settings);
      std::strncpy(mine.data(), memory_->name().c_str(), kNameBytes - 1);
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }
  check_mpi(MPI_Allgather(mine.data(), kNameBytes, MPI_CHAR, all.data(), kNameBytes, MPI_CHAR, comm_), "MPI_Allgather");
  const char* name = all.data() + kNameBytes * local_[0];
  if (local_rank != 0 && name[0] != 0) {
    try {
      memory_ = HostMemory::attach(name, local_rank, ranks, settings);
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }
  int good = memory_ != nullptr, everywhere = 0;
  check_mpi(MPI_Allreduce(&good, &everywhere, 1, MPI_INT, MPI_MIN, comm_), "MPI_Allreduce");
  if (!everywhere) {
    if (why_not_.empty()) why_not_ = "another rank has no shared memory";
    memory_.reset();
    return;
  }
  memory_->ready(Waiting(settings_.timeout));
}

// ---------------------------------------------------------------------------------------------------------------------
// Failures.

void Group::watch_for_notices() {
  notice_in_.assign(kNoticeBytes, 0);
  check_mpi(MPI_Irecv(notice_in_.data(), kNoticeBytes, MPI_CHAR, MPI_ANY_SOURCE, kNoticeTag, comm_, &notice_),
            "MPI_Irecv");
  std::weak_ptr<Group> weak = shared_from_this();
  Engine::instance().at_shutdown([weak] {
    auto group = weak.lock();
    if (!group || group->notice_ == MPI_REQUEST_NULL) return;
    MPI_Cancel(&group->notice_);
    MPI_Request_free(&group->notice_);
  });
}

void Group::check() {
  if (!broken() && notice_ != MPI_REQUEST_NULL) {
    int done = 0;
    MPI_Status status;
    if (MPI_Test(&notice_, &done, &status) == MPI_SUCCESS && done) {
      notice_in_.back() = 0;
      std::string reason =
          "rank " + std::to_string(settings_.names[status.MPI_SOURCE]) + " gave up: " + notice_in_.data();
      std::lock_guard<std::mutex> lock(mutex_);
      reason_ = reason;
      broken_ = true;
      keep_for_ever();
      if (memory_) memory_->abort(reason);
    }
  }
  if (broken()) throw Broken(failure());
}

void Group::keep_for_ever() {
  Engine::instance().mark_failed();
  new std::shared_ptr<Group>(shared_from_this());  // messages that were given up may still arrive in its buffers
}

std::string Group::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void Group::fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return;
    reason_ = reason;
    broken_ = true;
  }
  keep_for_ever();
  if (memory_) memory_->abort(reason);
  if (size() == 1 || comm_ == MPI_COMM_NULL) return;
  if (Engine::is_this_thread()) {
    send_notices(reason);
  } else if (Engine::instance().running()) {
    auto self = shared_from_this();
    Engine::instance().submit([self, reason] { self->send_notices(reason); });
  }
}

void Group::send_notices(const std::string& reason) {
  // Short messages that leave at once; their buffer is never freed because nobody waits for them.
  auto text = new std::vector<char>(kNoticeBytes, 0);
  std::strncpy(text->data(), reason.c_str(), kNoticeBytes - 1);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    MPI_Request request;
    if (MPI_Isend(text->data(), kNoticeBytes, MPI_CHAR, peer, kNoticeTag, comm_, &request) == MPI_SUCCESS) {
      int done = 0;
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (!done) MPI_Request_free(&request);
    }
  }
}

void Group::run(const std::string& what, uint64_t sequence, const std::function<void()>& operation) {
  auto where = [&] {
    return what + " (number " + std::to_string(sequence) + " of group '" + name() + "') failed on rank " +
           std::to_string(settings_.names[rank()]) + ": ";
  };
  auto give_up = [&](const std::string& why) {
    fail(where() + why);
    throw Broken(where() + why);
  };
  if (broken()) throw Broken(where() + "the group is broken by an earlier failure: " + failure());
  try {
    operation();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(where() + error.what());
  } catch (const Broken& error) {
    throw Broken(where() + error.what());
  } catch (const Late& error) {
    give_up(std::string(error.what()) + "; such a rank hangs, has died, or did not make this call");
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

Waiting Group::waiting(Timeout timeout) const {
  const bool leads = local_[0] == rank();
  if (hosts_ > 1 && !leads) timeout += 2 * kGrace;
  if (!Engine::is_this_thread()) return Waiting(timeout);
  auto self = const_cast<Group*>(this);
  return Waiting(timeout, [self] {
    Engine::instance().progress();
    self->check();
  });
}

Clock::time_point Group::deadline(Timeout timeout, bool between_hosts) const {
  return Clock::now() + timeout + (between_hosts && leaders_ ? kGrace : Timeout(0));
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives.

void Group::allreduce(void* data, size_t count, Dtype dtype, Op op, Timeout timeout) {
  if (!supports(dtype, op)) {
    throw std::invalid_argument(std::string("cannot reduce ") + dtrain::name_of(dtype) + " by " + dtrain::name_of(op));
  }
  if (size() == 1) return;
  if (in_memory()) return memory_->allreduce(data, count, dtype, op, waiting(timeout));
  if (!memory_) return everybody_->allreduce(data, count, dtype, op, size(), deadline(timeout));
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    Op inner = op == Op::average ? Op::sum : op;
    hook = [=](void* part, size_t length) { leaders->allreduce(part, length, dtype, inner, 0, end); };
  }
  memory_->allreduce_between(data, count, dtype, op, hook, waiting(timeout), size());
}

void Group::allreduce_compressed(float* data, size_t count, Wire wire, bool average, Timeout timeout) {
  // Inside a host nothing travels on a wire: full precision.
  const Op op = average ? Op::average : Op::sum;
  if (size() == 1 || in_memory()) return allreduce(data, count, Dtype::f32, op, timeout);
  if (!memory_) {
    return everybody_->allreduce_compressed(data, count, wire, average ? size() : 1, deadline(timeout));
  }
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    hook = [=](void* part, size_t length) {
      leaders->allreduce_compressed(static_cast<float*>(part), length, wire, 1, end);
    };
  }
  memory_->allreduce_between(data, count, Dtype::f32, op, hook, waiting(timeout), size());
}

void Group::reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, Timeout timeout) {
  if (!supports(dtype, op)) {
    throw std::invalid_argument(std::string("cannot reduce ") + dtrain::name_of(dtype) + " by " + dtrain::name_of(op));
  }
  if (size() == 1) {
    if (output != inputs[0]) std::memcpy(output, inputs[0], count * size_of(dtype));
  } else if (in_memory()) {
    memory_->reduce_scatter(inputs, output, count, dtype, op, waiting(timeout));
  } else {
    everybody_->reduce_scatter(inputs, output, count, dtype, op, size(), deadline(timeout));
  }
}

void Group::allgather(const void* input, void* const* outputs, size_t bytes, Timeout timeout) {
  if (size() == 1) {
    if (outputs[0] != input) std::memcpy(outputs[0], input, bytes);
  } else if (in_memory()) {
    memory_->allgather(input, outputs, bytes, waiting(timeout));
  } else {
    everybody_->allgather(input, outputs, bytes, deadline(timeout));
  }
}

void Group::broadcast(void* data, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) return;
  if (!memory_) return everybody_->broadcast(data, bytes, root, deadline(timeout));
  const bool here = host_of_[root] == host_of_[rank()];
  const int local_root = here ? static_cast<int>(std::find(local_.begin(), local_.end(), root) - local_.begin()) : 0;
  if (hosts_ == 1) return memory_->broadcast(data, bytes, local_root, waiting(timeout));
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    const int host = host_of_[root];
    hook = [=](void* part, size_t length) { leaders->broadcast(part, length, host, end); };
  }
  memory_->broadcast(data, bytes, local_root, waiting(timeout), hook, true);
}

void Group::barrier(Timeout timeout) {
  if (size() == 1) return;
  if (!memory_) return everybody_->barrier(deadline(timeout));
  if (hosts_ == 1) return memory_->barrier(waiting(timeout));
  uint8_t arrived = 1;  // an all-reduce of one byte: nobody has the result before everybody has come
  allreduce(&arrived, 1, Dtype::u8, Op::bor, timeout);
}

void Group::alltoall(const std::vector<Channel::Piece>& sends, const std::vector<Channel::Piece>& receives,
                     Timeout timeout) {
  if (size() == 1) {
    std::memmove(receives.at(0).data, sends.at(0).data, std::min(sends.at(0).bytes, receives.at(0).bytes));
  } else {
    everybody_->alltoall(sends, receives, deadline(timeout, false));
  }
}

void Group::gather(const void* input, void* const* outputs, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) {
    if (outputs[0] != input) std::memcpy(outputs[0], input, bytes);
  } else {
    everybody_->gather(input, outputs, bytes, root, deadline(timeout, false));
  }
}

void Group::scatter(const void* const* inputs, void* output, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) {
    if (output != inputs[0]) std::memcpy(output, inputs[0], bytes);
  } else {
    everybody_->scatter(inputs, output, bytes, root, deadline(timeout, false));
  }
}

}  // namespace dtrain
