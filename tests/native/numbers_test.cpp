// The arithmetic on its own: half precision, the reduction kernels, the codecs of the wire.
#include <limits>
#include <tuple>

#include "codec.h"
#include "testing.h"

namespace dtrain {

void halves() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = float_of_f16(half);
    const int exponent = (half >> 10) & 31;
    const int mantissa = half & 1023;
    if (exponent == 31 && mantissa != 0) {
      CHECK(std::isnan(value) && std::isnan(float_of_f16(f16_of(value))));
      continue;
    }
    const double size = exponent == 31 ? INFINITY
                        : exponent == 0 ? std::ldexp(mantissa, -24)
                                        : std::ldexp(mantissa + 1024, exponent - 25);
    CHECK(static_cast<double>(value) == (half & 0x8000 ? -size : size), "half %x", bits);
    CHECK(f16_of(value) == half, "half %x", bits);
    // Between this one and the next: the middle goes to the even one, anything beside it to the nearer one.
    if ((half & 0x7fff) >= 0x7bff) continue;
    const float next = float_of_f16(static_cast<uint16_t>(half + 1));
    const float middle = (value + next) / 2;
    CHECK(f16_of(middle) == (half & 1 ? half + 1 : half), "after half %x", bits);
    CHECK(f16_of(std::nextafter(middle, value)) == half && f16_of(std::nextafter(middle, next)) == half + 1);
  }
  CHECK(f16_of(65519.0f) == 0x7bff && f16_of(65520.0f) == 0x7c00 && f16_of(1e30f) == 0x7c00 &&
        f16_of(-1e30f) == 0xfc00);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = float_of_bf16(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(float_of_bf16(bf16_of(value))));
      CHECK(std::isnan(float_of_bf16(bf16_of(float_of(bits << 16 | 1)))));
      continue;
    }
    CHECK(bf16_of(value) == half);
    if ((half & 0x7fff) >= 0x7f80) continue;
    CHECK(bf16_of(float_of(bits << 16 | 0x8000)) == (half & 1 ? half + 1 : half));
    CHECK(bf16_of(float_of(bits << 16 | 0x7fff)) == half && bf16_of(float_of(bits << 16 | 0x8001)) == half + 1);
  }
  CHECK(std::isnan(float_of_bf16(bf16_of(float_of(0x7f800001)))));  // a payload that is cut off
}

void kernels() {
  for (const Dtype dtype : kDtypes) {
    for (const Op op : kOps) {
      const bool bitwise = op >= Op::band;
      const bool wanted = dtype == Dtype::boolean ? op != Op::average : !(bitwise && is_float(dtype));
      CHECK(supports(dtype, op) == wanted, "%s of %s", name_of(op), name_of(dtype));
      if (!wanted) {
        try {
          require_supported(dtype, op);
          CHECK(false);
        } catch (const std::invalid_argument& error) {
          CHECK(std::strstr(error.what(), name_of(dtype)) && std::strstr(error.what(), name_of(op)));
        }
        continue;
      }
      for (const size_t count : {0, 1, 7, 31, 1025, 3000}) {
        for (const int sources : {1, 2, 3, 5}) {
          std::vector<std::vector<uint8_t>> from;
          for (int source = 0; source < sources; ++source) from.push_back(make(count, dtype, source + 1));
          const auto expected = reference(from, count, dtype, op);
          for (int target = -1; target < sources; ++target) {  // a buffer of its own, and each source in place
            auto data = from;
            std::vector<uint8_t> apart = make(count, dtype, 99);
            uint8_t* to = target < 0 ? apart.data() : data[target].data();
            std::vector<const void*> pointers;
            for (const auto& one : data) pointers.push_back(one.data());
            reduce_many(to, pointers.data(), sources, count, dtype, op);
            CHECK(std::memcmp(to, expected.data(), expected.size()) == 0, "%s of %zu %s from %d sources into %d",
                  name_of(op), count, name_of(dtype), sources, target);
          }
        }
        auto to = make(count, dtype, 1);
        const auto from = make(count, dtype, 2);
        const auto expected = reference({to, from}, count, dtype, op == Op::average ? Op::sum : op);
        reduce_into(to.data(), from.data(), count, dtype, op);
        CHECK(to == expected, "%s of %zu %s", name_of(op), count, name_of(dtype));
      }
    }
  }
  const float nan = NAN;
  for (int place = 0; place < 3; ++place) {
    for (const Op op : {Op::minimum, Op::maximum}) {
      for (size_t count : {1, 40}) {
        std::vector<std::vector<float>> all(3, std::vector<float>(count, 1.0f));
        all[place].assign(count, nan);
        const void* pointers[] = {all[0].data(), all[1].data(), all[2].data()};
        reduce_many(all[0].data(), pointers, 3, count, Dtype::f32, op);
        for (const float value : all[0]) CHECK(std::isnan(value));
      }
    }
  }
  // Sums of half precision are rounded once: 2048 + 1 + 1 is 2050, not 2048.
  for (const auto& [dtype, of, large] :
       {std::tuple{Dtype::f16, &f16_of, 2048.0f}, std::tuple{Dtype::bf16, &bf16_of, 256.0f}}) {
    uint16_t a = of(large), b = of(1.0f), c = of(1.0f);
    const void* pointers[] = {&a, &b, &c};
    reduce_many(&a, pointers, 3, 1, dtype, Op::sum);
    CHECK(a == of(large + 2.0f));
  }
  int8_t small = -100;
  divide(&small, 1, Dtype::i8, 256);
  CHECK(small == 0);
  std::vector<float> values{3.0f, 9.0f};
  divide(values.data(), 2, Dtype::f32, 3);
  CHECK(values[0] == 1.0f && values[1] == 3.0f);
}

void codecs() {
  std::vector<float> values;
  for (size_t i = 0; i < 5000; ++i) {
    const auto random = static_cast<double>(mix(i)) / 18446744073709551616.0 - 0.5;
    values.push_back(static_cast<float>(random * std::ldexp(1.0, static_cast<int>(i / 256) - 10)));
  }
  values[17] = 0.0f;
  uint64_t hash = 1469598103934665603;
  for (const size_t count : {size_t(0), size_t(1), size_t(255), size_t(256), size_t(257), values.size()}) {
    for (const Wire wire : {Wire::bf16, Wire::int8}) {
      std::vector<uint8_t> bytes(encoded_size(wire, count) + 1 + 8, 0x5a);
      uint8_t* odd = bytes.data() + 1;  // no alignment is promised
      encode(wire, values.data(), count, odd);
      CHECK(odd[encoded_size(wire, count)] == 0x5a);
      std::vector<float> back(count + 1, 7.0f), added(count + 1, 0.375f);
      decode(wire, odd, count, back.data());
      decode_add(wire, odd, count, added.data());
      CHECK(back[count] == 7.0f && added[count] == 0.375f);
      for (size_t i = 0; i < count; ++i) {
        const size_t block = i / kInt8Block * kInt8Block;
        float largest = 0;
        for (size_t j = block; j < std::min(count, block + kInt8Block); ++j)
          largest = std::max(largest, std::fabs(values[j]));
        const float bound = wire == Wire::bf16 ? std::fabs(values[i]) / 256 : largest / 127 * 0.50001f;
        CHECK(std::fabs(back[i] - values[i]) <= bound, "value %zu: %g became %g", i, values[i], back[i]);
        volatile float product = back[i];
        CHECK(added[i] == 0.375f + product);
        if (values[i] == 0) CHECK(back[i] == 0);
      }
      for (size_t i = 0; i < encoded_size(wire, count); ++i) hash = (hash ^ odd[i]) * 1099511628211;
    }
  }
  std::printf("encoded bytes: %016llx\n", static_cast<unsigned long long>(hash));
  const float inf = INFINITY;
  for (const float bad : {inf, -inf, static_cast<float>(NAN)}) {
    for (const Wire wire : {Wire::bf16, Wire::int8}) {
      auto spoilt = values;
      spoilt[300] = bad;
      std::vector<uint8_t> bytes(encoded_size(wire, spoilt.size()));
      std::vector<float> back(spoilt.size());
      encode(wire, spoilt.data(), spoilt.size(), bytes.data());
      decode(wire, bytes.data(), spoilt.size(), back.data());
      CHECK(!std::isfinite(back[300]) && std::isfinite(back[255]) && std::isfinite(back[512]));
      if (wire == Wire::bf16) CHECK(std::isnan(bad) ? std::isnan(back[300]) : back[300] == bad);
    }
  }
  for (const float size : {0.0f, -0.0f, 1e-40f, 1e-33f}) {
    std::vector<float> tiny(300, size), back(300, 1.0f);
    std::vector<uint8_t> bytes(encoded_size(Wire::int8, tiny.size()));
    encode(Wire::int8, tiny.data(), tiny.size(), bytes.data());
    decode(Wire::int8, bytes.data(), tiny.size(), back.data());
    for (const float value : back) CHECK(value == 0.0f);
  }
  std::vector<float> huge(256, std::numeric_limits<float>::max()), back(256);
  std::vector<uint8_t> bytes(encoded_size(Wire::int8, 256));
  encode(Wire::int8, huge.data(), 256, bytes.data());
  decode(Wire::int8, bytes.data(), 256, back.data());
  for (const float value : back) CHECK(std::fabs(value / huge[0] - 1) < 1e-6);
}

}  // namespace dtrain
