// Ranks that differ, die, stop, give up, or cannot have shared memory: everybody learns it, nobody waits for good.
#include <sys/resource.h>

#include <thread>

#include "calls.h"
#include "testing.h"

namespace dtrain {

namespace {

// What the error of a rank was, by exit status.
enum { kNothing = 20, kMismatch, kTimedOut, kDied, kAborted };

template <class Action>
[[noreturn]] void leave_with_error(const Action& action, const std::string& part_of_text, int peer) {
  int kind = kNothing;
  std::string text;
  try {
    action();
  } catch (const Mismatch& error) {
    kind = kMismatch, text = error.what();
    CHECK(peer < 0 || error.rank == peer, "it named %d", error.rank);
    CHECK(!(error.theirs == error.ours) && text.find(error.theirs.text()) != text.npos &&
          text.find(error.ours.text()) != text.npos);
  } catch (const TimedOut& error) {
    kind = kTimedOut, text = error.what();
    CHECK(error.missing == std::vector<int>{peer});
  } catch (const PeerDied& error) {
    kind = kDied, text = error.what();
    CHECK(error.rank == peer && error.pid > 0);
  } catch (const Aborted& error) {
    kind = kAborted, text = error.what();
  }
  CHECK(text.find(part_of_text) != text.npos, "%s", text.c_str());
  std::_Exit(kind);
}

int count_of(const std::vector<int>& statuses, int kind) {
  int found = 0;
  for (const int status : statuses) found += WIFEXITED(status) && WEXITSTATUS(status) == kind;
  return found;
}

}  // namespace

void mismatch() {
  HostMemorySettings named = small_chunks();
  named.names = {10, 11, 12};
  std::vector<float> data(100000);
  std::vector<void*> outputs(3, data.data());
  const auto both = [&](int ranks, const char* text, const std::function<void(HostMemory&, int)>& action) {
    const auto statuses = fork_ranks(ranks, named, [&](HostMemory& memory) {
      memory.barrier(patient());
      const int odd = memory.ranks() - 1;
      const int peer = memory.ranks() == 2 ? 1 - memory.rank() : memory.rank() == odd ? -1 : odd;
      const bool exact = memory.ranks() == 2 && memory.rank() == 0;
      leave_with_error([&] { action(memory, memory.rank() == odd); }, exact ? text : "called", peer);
    });
    // With three ranks, one that comes after two others have failed already hears it from them.
    CHECK(count_of(statuses, kMismatch) + (ranks > 2 ? count_of(statuses, kAborted) : 0) == ranks, "%s", text);
    CHECK(count_of(statuses, kMismatch) >= 2);
  };
  for (const int ranks : {2, 3}) {
    const std::string odd = ranks == 2 ? "rank 11" : "rank 12";
    both(ranks,
         (odd + " called all_reduce(sum) of 1,001 float32, this rank (rank 10) all_reduce(sum) of 1,000 float32")
             .c_str(),
         [&](HostMemory& memory, bool other) {
           memory.allreduce(data.data(), other ? 1001 : 1000, Dtype::f32, Op::sum, patient());
         });
    both(ranks, "all_reduce(max) of 8 float32", [&](HostMemory& memory, bool other) {
      memory.allreduce(data.data(), other ? 80000 : 8, Dtype::f32, Op::maximum, patient());
    });
    both(ranks, "all_reduce(sum) of 90,000 int32", [&](HostMemory& memory, bool other) {
      memory.allreduce(data.data(), 90000, other ? Dtype::i32 : Dtype::f32, Op::sum, patient());
    });
    both(ranks, "broadcast(root 1) of 7 bytes", [&](HostMemory& memory, bool other) {
      memory.broadcast(data.data(), 7, other ? 1 : 0, patient());
    });
    both(ranks, "called barrier", [&](HostMemory& memory, bool other) {
      if (other) return memory.barrier(patient());
      memory.allgather(data.data() + 50000, outputs.data(), 100001, patient());
    });
    both(ranks, "gather(root 1) of 7 bytes", [&](HostMemory& memory, bool other) {
      memory.meet(Kind::gather, 7, patient(), other ? 1 : 0);
    });
    both(ranks, "all_to_all", [&](HostMemory& memory, bool other) {
      if (other) return memory.meet(Kind::alltoall, 0, patient());
      memory.allreduce(data.data(), 8, Dtype::f32, Op::sum, patient());
    });
    both(ranks, "between hosts", [&](HostMemory& memory, bool other) {
      if (other) return memory.allreduce(data.data(), 9, Dtype::f32, Op::sum, patient());
      memory.allreduce_between(data.data(), 9, Dtype::f32, Op::sum, [](void*, size_t) {}, patient());
    });
    both(ranks, "average over 7", [&](HostMemory& memory, bool other) {
      if (!memory.try_allreduce(data.data(), 9, Dtype::f32, Op::average, microseconds(50), other ? 7 : 0))
        memory.finish(patient());
    });
  }
}

// What a rank knows of the others' calls, whoever is ahead.
void calls() {
  const auto call = [](Call::Kind kind, size_t count, int root) {
    Call made;
    made.kind = kind, made.count = count, made.root = root;
    return made;
  };
  const auto numbered = [](Call made, uint64_t number) {
    made.number = number;
    return made;
  };
  const Call gather = call(Call::gather, 40, 0), other = call(Call::gather, 40, 1);
  Calls here;
  CHECK(!here.untold(seconds(0)));
  CHECK(!here.hear(1, numbered(gather, 1)) && !here.hear(2, numbered(other, 2)) && !here.hear(3, numbered(gather, 3)));
  CHECK(!here.add(gather));
  CHECK(!here.untold(seconds(60)) && *here.untold(seconds(0)) == numbered(gather, 1) && !here.untold(seconds(0)));
  const auto ahead = here.add(gather);  // rank 2 was here before, with another root
  CHECK(ahead && ahead->rank == 2 && ahead->theirs == numbered(other, 2) && ahead->own == numbered(gather, 2));
  CHECK(!here.add(gather));
  CHECK(!here.hear(1, numbered(gather, 2)));
  const auto behind = here.hear(3, numbered(other, 1));
  CHECK(behind && behind->rank == 3 && behind->own == numbered(gather, 1));
  for (int i = 0; i < 1000; ++i) here.add(gather);
  CHECK(!here.hear(3, numbered(other, 1)));  // too long ago to know

  Calls one, two;
  one.add(gather), two.add(gather);
  CHECK(one.header(gather).chain == two.header(gather).chain);
  one.add(gather), two.add(other);
  CHECK(one.header(gather).chain == two.header(gather).chain);  // of what was before
  one.add(gather), two.add(gather);
  CHECK(one.header(gather).chain != two.header(gather).chain && two.header(gather).before == numbered(other, 2));
  CHECK(call(Call::broadcast, 1234567, 3).text() == "broadcast(root 3) of 1,234,567 bytes");
}

// One rank goes away in the middle of a large all-reduce; the others learn which one.
void died() {
  for (const bool named : {false, true}) {
    HostMemorySettings settings = small_chunks();
    settings.named = named;
    const auto statuses = fork_ranks(3, settings, [&](HostMemory& memory) {
      std::vector<float> data(100000);
      for (int round = 0; round < 3; ++round)
        memory.allreduce(data.data(), data.size(), Dtype::f32, Op::sum, patient());
      if (memory.rank() == 2) kill(getpid(), SIGKILL);
      leave_with_error([&] { memory.allreduce(data.data(), data.size(), Dtype::f32, Op::sum, patient()); },
                       "of rank 2 has ended", 2);
    });
    CHECK(count_of(statuses, kDied) >= 1 && count_of(statuses, kDied) + count_of(statuses, kAborted) == 2);
  }
  // One that closes while it is needed counts as gone too.
  const auto statuses = fork_ranks(2, {}, [&](HostMemory& memory) {
    if (memory.rank() == 1) return;
    leave_with_error([&] { memory.barrier(patient()); }, "rank 1 closed the group", 1);
  });
  CHECK(count_of(statuses, kDied) == 1);
}

void stopped() {
  const auto statuses = fork_ranks(3, {}, [&](HostMemory& memory) {
    memory.barrier(patient());
    if (memory.rank() == 1) kill(getpid(), SIGSTOP);
    int polls = 0;
    const Waiting waiting(milliseconds(memory.rank() == 0 ? 300 : 3000), [&] { ++polls; });
    float value = 1;
    const auto wait = [&] {
      try {
        memory.allreduce(&value, 1, Dtype::f32, Op::sum, waiting);
      } catch (...) {
        CHECK(polls > 5, "%d polls", polls);
        // It stays broken, and says so at once.
        try {
          memory.barrier(patient());
          CHECK(false);
        } catch (const Aborted&) {
        }
        throw;
      }
    };
    leave_with_error(wait, "rank 1", 1);
  });
  CHECK(WIFSIGNALED(statuses[1]) && WEXITSTATUS(statuses[0]) == kTimedOut && WEXITSTATUS(statuses[2]) == kAborted);
}

void aborted() {
  auto statuses = fork_ranks(3, {}, [&](HostMemory& memory) {
    memory.barrier(patient());
    std::thread other;
    if (memory.rank() == 1) {
      other = std::thread([&] {
        usleep(30000);
        memory.abort("the user wants to stop " + std::string(1000, '.'));
      });
    }
    const auto wait = [&] {
      try {
        if (memory.rank() != 2) memory.barrier(patient());
        if (memory.rank() == 2 && !memory.try_barrier(microseconds(1))) memory.finish(patient());
      } catch (const Aborted& error) {
        CHECK(error.by == 1 && error.reason.size() < 450);
        if (other.joinable()) other.join();
        throw;
      }
    };
    if (memory.rank() == 0) usleep(100000);  // this one learns it at the door
    leave_with_error(wait, "rank 1 ended communication: the user wants to stop", 1);
  });
  CHECK(count_of(statuses, kAborted) == 3);
  // Wrong use breaks nothing: the group goes on until somebody ends it.
  statuses = fork_ranks(2, {}, [&](HostMemory& memory) {
    memory.barrier(patient());
    if (memory.rank() == 1) {
      memory.broadcast(nullptr, 0, 0, patient());
      leave_with_error([&] { memory.barrier(patient()); }, "interrupted", 0);
    }
    float value = 0;
    const std::function<void()> wrong[] = {
        [&] { memory.allreduce_between(&value, 1, Dtype::f32, Op::sum, [](void*, size_t) {}, patient()); },
        [&] { memory.allreduce(&value, 1, Dtype::f32, Op::bxor, patient()); },
        [&] { memory.broadcast(&value, 4, 2, patient()); },
        [&] { memory.try_allreduce(&value, 1 << 20, Dtype::f32, Op::sum, microseconds(0)); },
    };
    for (const auto& call : wrong) {
      try {
        call();
        CHECK(false);
      } catch (const std::logic_error&) {  // std::invalid_argument is one
      }
    }
    memory.broadcast(nullptr, 0, 0, patient());
    memory.abort("interrupted");
  });
  CHECK(count_of(statuses, kAborted) == 1 && statuses[0] == 0);
  // What a poll throws comes out, and the peers hear of it.
  statuses = fork_ranks(2, {}, [&](HostMemory& memory) {
    if (memory.rank() == 1) {
      usleep(50000);
      leave_with_error([&] { memory.barrier(patient()); }, "interrupted by a poll", 0);
    }
    try {
      memory.barrier(Waiting(seconds(60), [] { throw std::runtime_error("interrupted by a poll"); }));
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()) == "interrupted by a poll");
      std::_Exit(0);
    }
  });
  CHECK(count_of(statuses, kAborted) == 1 && statuses[0] == 0);
}

// The leader fails between the hosts: the others, who wait for its result, hear why.
void hook_fails() {
  const auto statuses = fork_ranks(3, small_chunks(), [&](HostMemory& memory) {
    std::vector<float> data(100000);
    int calls = 0;
    const auto hook = [&](void*, size_t) {
      if (++calls == 3) throw std::runtime_error("the cable is out");
    };
    const auto reduce = [&] {
      memory.allreduce_between(data.data(), data.size(), Dtype::f32, Op::sum, hook, patient());
    };
    if (memory.rank() != 0) leave_with_error(reduce, "rank 0 ended communication: the cable is out", 0);
    try {
      reduce();
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()) == "the cable is out" && calls == 3);
      return;
    }
    CHECK(false);
  });
  CHECK(statuses[0] == 0 && count_of(statuses, kAborted) == 2);
}

void unavailable() {
  const auto refused = [](const std::function<void()>& action, const char* part) {
    try {
      action();
      CHECK(false, "%s", part);
    } catch (const Unavailable& error) {
      CHECK(std::strstr(error.what(), part), "%s", error.what());
    }
  };
  const auto before = left_in_shared_memory();
  refused([] { HostMemory::attach("/dtrain-nobody", 1, 2); },
          "cannot open the shared memory '/dtrain-nobody' made by rank 0");
  refused([] { HostMemory::attach("/proc/1/fd/987654", 1, 2); }, "rank 1 cannot open");
  HostMemorySettings huge;
  huge.named = true;
  huge.chunk_bytes = size_t{1} << 44;
  refused([&] { HostMemory::create(2, huge); }, "of shared memory failed");
  signal(SIGXFSZ, SIG_IGN);
  rlimit limit{}, old{};
  getrlimit(RLIMIT_FSIZE, &old);
  limit = old;
  limit.rlim_cur = 1 << 20;
  setrlimit(RLIMIT_FSIZE, &limit);
  refused([] { HostMemory::create(8); }, "of shared memory failed");
  setrlimit(RLIMIT_FSIZE, &old);
  for (const bool named : {false, true}) {
    HostMemorySettings settings, other;
    settings.named = named;
    other.chunk_bytes = settings.chunk_bytes * 2;
    const auto memory = HostMemory::create(2, settings);
    refused([&] { HostMemory::attach(memory->name(), 1, 2, other); }, "give all ranks of a host the same settings");
    refused([&] { HostMemory::attach(memory->name(), 1, 3, settings); }, "give all ranks of a host the same settings");
    CHECK(left_in_shared_memory().size() == before.size() + named);
  }
  CHECK(left_in_shared_memory() == before);
  try {
    HostMemory::create(2)->ready(Waiting(milliseconds(50)));
    CHECK(false);
  } catch (const TimedOut& error) {
    CHECK(error.missing == std::vector<int>{1} && std::strstr(error.what(), "joining"), "%s", error.what());
  }
}

void leaves_nothing() {
  HostMemorySettings settings;
  settings.named = true;
  const auto before = left_in_shared_memory();
  fork_ranks(2, settings, [](HostMemory& memory) {
    memory.barrier(patient());
    kill(getpid(), SIGKILL);
  });
  CHECK(left_in_shared_memory() == before);
}

}  // namespace dtrain
