// How a group comes to be: its communicators, which ranks share a host, and that host's memory. And how it ends.
#include <algorithm>
#include <cstring>
#include <map>

#include "group.h"
#include "host_memory.h"

namespace dtrain {

namespace {

constexpr size_t kNameBytes = 256;
// Pieces that go between hosts: long enough for a network, short enough that the ranks of a host work meanwhile.
constexpr size_t kBetweenHosts = 4 * 1024 * 1024;

/// A number for a new group that no other one has had: this process's rank and how many it has made before.
uint64_t new_id() {
  static uint32_t made = 0;  // touched by the communication thread only
  return static_cast<uint64_t>(Engine::instance().rank()) << 32 | ++made;
}

}  // namespace

Group::Group() = default;

Group::~Group() {
  if (comms_.id != 0) Engine::instance().put_by().add(std::move(comms_));
}

std::shared_ptr<Group> Group::create(const GroupSettings& settings, const std::vector<int>& world_ranks) {
  std::shared_ptr<Group> group(new Group());
  group->settings_ = settings;
  group->local_ = {settings.rank};
  if (settings.size == 1) return group;
  group->comms_.members = world_ranks;
  Engine::instance().call([group] { group->connect(); }, settings.timeout,
                          "making the communicators of group '" + settings.name + "'");
  return group;
}

void Group::connect() {
  auto& engine = Engine::instance();
  MPI_Group all, members;
  check_mpi(MPI_Comm_group(engine.world(), &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, size(), comms_.members.data(), &members), "MPI_Group_incl");
  int tag = static_cast<int>(std::hash<std::string>()(settings_.name) % 30000);
  check_mpi(MPI_Comm_create_group(engine.world(), members, tag, &comms_.everybody), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  check_mpi(MPI_Comm_set_errhandler(comms_.everybody, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_dup(comms_.everybody, &comms_.transfers), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comms_.transfers, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  auto poll = [this] { look(); };
  everybody_.reset(new Channel(comms_.everybody, settings_.names, calls_, poll));
  find_hosts();
  engine.notices().add(comms_.id, weak_from_this());
  engine.statistics().communicators -= engine.put_by().free_agreed(comms_.everybody, comms_.members);
  if (settings_.shared_memory) share_memory();
  if (!memory_) {  // everyone is a host of his own
    hosts_ = size();
    local_ = {rank()};
  } else if (hosts_ > 1) {
    const bool lead = local_[0] == rank();
    check_mpi(MPI_Comm_split(comms_.everybody, lead ? 0 : MPI_UNDEFINED, host_of_[rank()], &comms_.leaders),
              "MPI_Comm_split");
    if (lead) {
      check_mpi(MPI_Comm_set_errhandler(comms_.leaders, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      std::vector<int> names;
      for (int leader : leader_) names.push_back(settings_.names[leader]);
      leaders_.reset(new Channel(comms_.leaders, names, calls_, poll));
    }
  }
  engine.statistics().communicators += comms_.count();
}

void Group::find_hosts() {
  struct Facts {
    uint64_t id;
    int64_t host, ranks_per_host, shared_memory;
  };
  const Facts mine{new_id(), Engine::instance().host(), settings_.ranks_per_host, settings_.shared_memory};
  std::vector<Facts> all(size());
  const int bytes = static_cast<int>(sizeof(Facts));
  check_mpi(MPI_Allgather(&mine, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comms_.everybody), "MPI_Allgather");
  // Those of rank 0 count for all: ranks with different environments must not go different ways.
  comms_.id = all[0].id;
  settings_.ranks_per_host = static_cast<int>(all[0].ranks_per_host);
  settings_.shared_memory = all[0].shared_memory != 0;
  if (!settings_.shared_memory) why_not_ = "switched off";
  std::map<std::pair<int64_t, int>, int> numbers;  // (host, which part of it) -> number
  std::map<int64_t, int> seen;
  host_of_.resize(size());
  local_.clear();
  for (int i = 0; i < size(); ++i) {
    int part = settings_.ranks_per_host > 0 ? seen[all[i].host]++ / settings_.ranks_per_host : 0;
    auto found = numbers.emplace(std::make_pair(all[i].host, part), static_cast<int>(numbers.size()));
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
  check_mpi(MPI_Allgather(mine.data(), kNameBytes, MPI_CHAR, all.data(), kNameBytes, MPI_CHAR, comms_.everybody),
            "MPI_Allgather");
  const char* name = all.data() + kNameBytes * local_[0];
  if (local_rank != 0 && name[0] != 0) {
    try {
      memory_ = HostMemory::attach(name, local_rank, ranks, settings);
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }
  int good = memory_ != nullptr, everywhere = 0;
  check_mpi(MPI_Allreduce(&good, &everywhere, 1, MPI_INT, MPI_MIN, comms_.everybody), "MPI_Allreduce");
  if (!everywhere) {
    if (why_not_.empty()) why_not_ = "another rank has no shared memory";
    memory_.reset();
    return;
  }
  memory_->ready(Waiting(settings_.timeout));
}

}  // namespace dtrain
