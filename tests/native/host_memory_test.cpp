// Real processes, forked here, over the real shared memory: every collective against a serial reference.
// Usage: host_memory_test CASE; without a case it lists them. Compiled and run by test_host_memory.py.
#include <map>
#include <random>
#include <thread>

#include "testing.h"

namespace dtrain {
namespace {

void check_allreduce(HostMemory& memory, size_t count, Dtype dtype, Op op, uint64_t seed) {
  auto data = make(count, dtype, seed * 64 + memory.rank());
  memory.allreduce(data.data(), count, dtype, op, patient());
  const auto expected = reference_of_ranks(memory.ranks(), count, dtype, op, seed);
  CHECK(data == expected, "rank %d of %d: %s of %zu %s", memory.rank(), memory.ranks(), name_of(op), count,
        name_of(dtype));
}

void allreduce(int ranks) {
  run_ranks(ranks, {}, [](HostMemory& memory) {
    uint64_t seed = 0;
    for (const Dtype dtype : kDtypes) {
      for (const Op op : kOps) {
        if (!supports(dtype, op)) continue;
        for (const size_t bytes : {4096, 65536}) {
          const size_t count = bytes / size_of(dtype);
          if (op == Op::sum || bytes == 4096) {
            for (const size_t near : {count - 1, count, count + 1}) check_allreduce(memory, near, dtype, op, ++seed);
          }
        }
        for (const size_t count : {0, 1, 7}) check_allreduce(memory, count, dtype, op, ++seed);
      }
    }
    check_allreduce(memory, 1000003, Dtype::f32, Op::sum, ++seed);
    check_allreduce(memory, 700001, Dtype::bf16, Op::average, ++seed);
    check_allreduce(memory, 300001, Dtype::i64, Op::maximum, ++seed);
  });
  run_ranks(ranks, small_chunks(), [](HostMemory& memory) {
    uint64_t seed = 1000;
    for (const Dtype dtype : kDtypes) {
      for (const Op op : kOps) {
        if (supports(dtype, op)) check_allreduce(memory, 50021 / size_of(dtype), dtype, op, ++seed);
      }
    }
  });
}

void check_reduce_scatter(HostMemory& memory, size_t count, Dtype dtype, Op op, uint64_t seed, bool in_place) {
  const int ranks = memory.ranks();
  std::vector<std::vector<uint8_t>> inputs;
  std::vector<const void*> pointers;
  for (int part = 0; part < ranks; ++part)
    inputs.push_back(make(count, dtype, (seed * 64 + part) * 64 + memory.rank()));
  for (const auto& one : inputs) pointers.push_back(one.data());
  std::vector<uint8_t> output = make(count, dtype, 1);
  auto& target = in_place ? inputs[memory.rank()] : output;
  memory.reduce_scatter(pointers.data(), target.data(), count, dtype, op, patient());
  CHECK(target == reference_of_ranks(ranks, count, dtype, op, seed * 64 + memory.rank()), "rank %d: %s of %zu %s",
        memory.rank(), name_of(op), count, name_of(dtype));
}

void check_allgather(HostMemory& memory, size_t bytes, uint64_t seed, bool in_place) {
  std::vector<std::vector<uint8_t>> outputs(memory.ranks(), std::vector<uint8_t>(bytes + 1, 0x5a));
  std::vector<void*> pointers;
  for (auto& one : outputs) pointers.push_back(one.data());
  const auto input = make(bytes, Dtype::u8, seed * 64 + memory.rank());
  if (in_place) outputs[memory.rank()] = input, pointers[memory.rank()] = outputs[memory.rank()].data();
  memory.allgather(in_place ? pointers[memory.rank()] : input.data(), pointers.data(), bytes, patient());
  for (int peer = 0; peer < memory.ranks(); ++peer) CHECK(outputs[peer] == make(bytes, Dtype::u8, seed * 64 + peer));
}

void check_broadcast(HostMemory& memory, size_t bytes, int root, uint64_t seed) {
  auto data = make(bytes, Dtype::u8, seed * 64 + memory.rank());
  memory.broadcast(data.data(), bytes, root, patient());
  CHECK(data == make(bytes, Dtype::u8, seed * 64 + root), "rank %d: %zu bytes from %d", memory.rank(), bytes, root);
}

void movement(int ranks) {
  run_ranks(ranks, small_chunks(), [](HostMemory& memory) {
    uint64_t seed = 0;
    for (const size_t count : {0, 1, 7, 1023, 4097, 16385, 40003}) {
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::i8, Dtype::f64}) {
        for (const Op op : {Op::sum, Op::average, Op::maximum}) {
          if (count <= 4097 || op == Op::sum) check_reduce_scatter(memory, count, dtype, op, ++seed, count % 2 == 0);
        }
      }
      check_allgather(memory, count, ++seed, false);
      check_allgather(memory, count, ++seed, true);
      for (int root = 0; root < memory.ranks(); ++root) check_broadcast(memory, count, root, ++seed);
      memory.barrier(patient());
    }
  });
  run_ranks(ranks, {}, [](HostMemory& memory) {
    check_reduce_scatter(memory, 200003, Dtype::f32, Op::sum, 1, false);
    check_allgather(memory, 3000001, 2, false);
    check_broadcast(memory, 3000001, memory.ranks() - 1, 3);
  });
}

// A host alone does everything with itself.
void one() {
  run_ranks(1, small_chunks(), [](HostMemory& memory) {
    for (const size_t count : {0, 7, 100003}) {
      check_allreduce(memory, count, Dtype::f32, Op::average, 1);
      check_reduce_scatter(memory, count, Dtype::f32, Op::sum, 2, false);
      check_allgather(memory, count, 3, false);
      check_broadcast(memory, count, 0, 4);
      memory.barrier(patient());
      CHECK(memory.try_barrier(microseconds(0)));
      std::vector<float> data(count, 3.0f);
      CHECK(memory.try_allreduce(data.data(), count, Dtype::f32, Op::average, microseconds(0), 3));
      for (const float value : data) CHECK(value == 1.0f);
    }
  });
}

// The hook adds what a second host with the same numbers would send: the sum again.
void check_between(HostMemory& memory, size_t count, Dtype dtype, Op op, uint64_t seed) {
  auto data = make(count, dtype, seed * 64 + memory.rank());
  size_t seen = 0;
  const auto hook = [&](void* part, size_t elements) {
    CHECK(memory.rank() == 0 && elements > 0 && (memory.ranks() == 1 || reinterpret_cast<uintptr_t>(part) % 64 == 0));
    const std::vector<uint8_t> other(static_cast<uint8_t*>(part),
                                     static_cast<uint8_t*>(part) + elements * size_of(dtype));
    reduce_into(part, other.data(), elements, dtype, op);
    seen += elements;
  };
  memory.allreduce_between(data.data(), count, dtype, op, memory.rank() == 0 ? BetweenHosts(hook) : BetweenHosts(),
                           patient(), 2 * memory.ranks());
  if (memory.rank() == 0) CHECK(seen == count);
  auto expected = reference_of_ranks(memory.ranks(), count, dtype, op == Op::average ? Op::sum : op, seed);
  const auto same = expected;
  reduce_into(expected.data(), same.data(), count, dtype, op);
  if (op == Op::average) divide(expected.data(), count, dtype, 2 * memory.ranks());
  CHECK(data == expected, "rank %d of %d: %s of %zu %s", memory.rank(), memory.ranks(), name_of(op), count,
        name_of(dtype));
}

void check_broadcast_between(HostMemory& memory, size_t bytes, int root, uint64_t seed) {
  // The receiving side: what the hook leaves in shared memory is what everybody gets, whatever rank 0 had.
  auto data = make(bytes, Dtype::u8, seed * 64 + memory.rank());
  const auto sent = make(bytes, Dtype::u8, seed * 64 + 33);
  size_t seen = 0;
  const auto receive = [&](void* part, size_t count) {
    std::memcpy(part, sent.data() + seen, count);
    seen += count;
  };
  memory.broadcast(data.data(), bytes, 0, patient(), memory.rank() == 0 ? BetweenHosts(receive) : BetweenHosts(), true);
  CHECK(data == sent);
  // The sending side: rank 0 sees what root has.
  data = make(bytes, Dtype::u8, seed * 64 + memory.rank());
  const auto expected = make(bytes, Dtype::u8, seed * 64 + root);
  std::vector<uint8_t> passed;
  const auto send = [&](void* part, size_t count) {
    passed.insert(passed.end(), static_cast<uint8_t*>(part), static_cast<uint8_t*>(part) + count);
  };
  memory.broadcast(data.data(), bytes, root, patient(), memory.rank() == 0 ? BetweenHosts(send) : BetweenHosts(), true);
  CHECK(data == expected);
  if (memory.rank() == 0) CHECK(passed.size() == bytes && std::equal(passed.begin(), passed.end(), expected.begin()));
}

void between(int ranks) {
  run_ranks(ranks, small_chunks(), [](HostMemory& memory) {
    uint64_t seed = 0;
    for (const size_t count : {0, 1, 7, 1023, 16385, 65537, 200003}) {
      check_between(memory, count, Dtype::f32, Op::sum, ++seed);
      check_between(memory, count, Dtype::f32, Op::average, ++seed);
      check_between(memory, count, Dtype::bf16, Op::average, ++seed);
      check_between(memory, count, Dtype::i16, Op::maximum, ++seed);
      check_broadcast_between(memory, count, memory.ranks() - 1, ++seed);
      check_allreduce(memory, count, Dtype::f32, Op::sum, ++seed);
    }
  });
}

// float16 averages over hosts are divided before they travel, or they would overflow.
void between_halves() {
  run_ranks(2, small_chunks(), [](HostMemory& memory) {
    std::vector<uint16_t> data(1000, f16_of(40000.0f));
    const auto hook = [](void* part, size_t count) {
      const std::vector<uint16_t> other(static_cast<uint16_t*>(part), static_cast<uint16_t*>(part) + count);
      reduce_into(part, other.data(), count, Dtype::f16, Op::sum);
    };
    memory.allreduce_between(data.data(), data.size(), Dtype::f16, Op::average, hook, patient(), 4);
    for (const uint16_t value : data) CHECK(value == f16_of(40000.0f));
  });
}

// try_allreduce in one thread, finish in another, while peers are early, late, or use the plain call.
void check_try(HostMemory& memory, size_t count, uint64_t seed, std::mt19937& random) {
  auto data = make(count, Dtype::f32, seed * 64 + memory.rank());
  if (random() % 3 == 0) {
    memory.allreduce(data.data(), count, Dtype::f32, Op::average, patient());
  } else if (!memory.try_allreduce(data.data(), count, Dtype::f32, Op::average, microseconds(random() % 20))) {
    CHECK(memory.pending());
    std::thread([&] { memory.finish(patient()); }).join();
  }
  CHECK(!memory.pending());
  CHECK(data == reference_of_ranks(memory.ranks(), count, Dtype::f32, Op::average, seed));
}

void tries() {
  run_ranks(3, {}, [](HostMemory& memory) {
    std::mt19937 random(memory.rank());
    for (uint64_t round = 0; round < 300; ++round) {
      if (random() % 8 == 0) usleep(random() % 300);
      check_try(memory, round % 5 * 33, round, random);
      if (!memory.try_barrier(microseconds(random() % 10))) memory.finish(patient());
    }
    // While one is open, no other may begin; nothing is broken by trying.
    if (memory.rank() == 0) {
      float value = 1.0f;
      if (!memory.try_allreduce(&value, 1, Dtype::f32, Op::sum, microseconds(0))) {
        try {
          memory.barrier(patient());
          CHECK(false);
        } catch (const std::logic_error&) {
        }
        memory.finish(patient());
      }
      CHECK(value == 3.0f);
    } else {
      usleep(20000);
      float value = 1.0f;
      memory.allreduce(&value, 1, Dtype::f32, Op::sum, patient());
      CHECK(value == 3.0f);
    }
    try {
      memory.finish(patient());
      CHECK(false);
    } catch (const std::logic_error&) {
    }
    memory.barrier(patient());
  });
}

// Many collectives of all kinds in a row, ranks out of step by random sleeps. Values are checked at some places.
void stress(int ranks) {
  constexpr int kRounds = 7000;
  run_ranks(ranks, small_chunks(), [](HostMemory& memory) {
    std::mt19937 common(7), own(memory.rank() + 1);
    const int ranks = memory.ranks();
    const auto value = [](int rank, int round, size_t i) {
      return static_cast<int32_t>(mix(i + 977 * round) % 100000) + rank;
    };
    const size_t most = 40000;
    std::vector<int32_t> data(most * ranks), output(most * ranks);
    for (int round = 0; round < kRounds; ++round) {
      const size_t count = common() % 40 == 0 ? common() % most : common() % 8 == 0 ? common() % 6000 : common() % 200;
      const int root = static_cast<int>(common() % ranks);
      const int kind = static_cast<int>(common() % 7);
      if (own() % 100 == 0) usleep(own() % 300);
      const bool whole = kind == 1 || kind == 2;
      const size_t used = whole ? count * ranks : count;
      for (size_t i = 0; i < used; ++i) data[i] = value(memory.rank(), round, i);
      std::vector<const void*> inputs(ranks);
      std::vector<void*> outputs(ranks);
      for (int peer = 0; peer < ranks; ++peer)
        inputs[peer] = &data[peer * count], outputs[peer] = &output[peer * count];
      const auto total = [&](size_t i) { return ranks * value(0, round, i) + ranks * (ranks - 1) / 2; };
      const auto spots = [&](const auto& right) {
        if (count == 0) return;
        for (const size_t i : {size_t(0), count / 2, count - 1, size_t(own() % count)}) {
          CHECK(right(i), "rank %d, round %d, kind %d, %zu elements, element %zu", memory.rank(), round, kind, count,
                i);
        }
      };
      switch (kind) {
        case 0:
        case 5:
          if (kind == 5 && memory.is_small(count, Dtype::i32)) {
            if (!memory.try_allreduce(data.data(), count, Dtype::i32, Op::sum, microseconds(own() % 30)))
              memory.finish(patient());
          } else {
            memory.allreduce(data.data(), count, Dtype::i32, Op::sum, patient());
          }
          spots([&](size_t i) { return data[i] == total(i); });
          break;
        case 1:
          memory.reduce_scatter(inputs.data(), output.data(), count, Dtype::i32, Op::sum, patient());
          spots([&](size_t i) { return output[i] == total(memory.rank() * count + i); });
          break;
        case 2:
          memory.allgather(data.data(), outputs.data(), count * 4, patient());
          for (int peer = 0; peer < ranks; ++peer)
            spots([&](size_t i) { return output[peer * count + i] == value(peer, round, i); });
          break;
        case 3:
          memory.broadcast(data.data(), count * 4, root, patient());
          spots([&](size_t i) { return data[i] == value(root, round, i); });
          break;
        case 4:
          memory.allreduce_between(data.data(), count, Dtype::i32, Op::sum,
                                   memory.rank() == 0 ? BetweenHosts([](void*, size_t) {}) : BetweenHosts(), patient());
          spots([&](size_t i) { return data[i] == total(i); });
          break;
        default: memory.barrier(patient()); break;
      }
    }
  });
}

}  // namespace

// In numbers_test.cpp and failures_test.cpp.
void halves();
void kernels();
void codecs();
void calls();
void mismatch();
void died();
void stopped();
void aborted();
void hook_fails();
void unavailable();
void leaves_nothing();

}  // namespace dtrain

using namespace dtrain;

int main(int count, char** words) {
  const std::map<std::string, std::function<void()>> cases = {
      {"halves", halves},
      {"kernels", kernels},
      {"codecs", codecs},
      {"one", one},
      {"allreduce2", [] { allreduce(2); }},
      {"allreduce3", [] { allreduce(3); }},
      {"allreduce4", [] { allreduce(4); }},
      {"movement", [] { movement(2), movement(3), movement(4); }},
      {"between", [] { between(1), between(2), between(3), between(4), between_halves(); }},
      {"tries", tries},
      {"stress", [] { stress(2), stress(3), stress(4); }},
      {"calls", calls},
      {"mismatch", mismatch},
      {"died", died},
      {"stopped", stopped},
      {"aborted", aborted},
      {"hook_fails", hook_fails},
      {"unavailable", unavailable},
      {"leaves_nothing", leaves_nothing},
  };
  if (count != 2 || cases.count(words[1]) == 0) {
    for (const auto& one : cases) std::printf("%s\n", one.first.c_str());
    return count == 1 ? 0 : 2;
  }
  cases.at(words[1])();
  std::printf("ok\n");
  return 0;
}
