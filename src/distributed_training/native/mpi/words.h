// Numbers as messages write them.
#pragma once

#include <cstdint>
#include <string>

namespace dtrain {

/// 1234567 as "1,234,567".
inline std::string with_commas(uint64_t number) {
  std::string text = std::to_string(number);
  for (int place = static_cast<int>(text.size()) - 3; place > 0; place -= 3) text.insert(place, ",");
  return text;
}

}  // namespace dtrain
