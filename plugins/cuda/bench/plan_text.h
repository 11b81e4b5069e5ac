#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gemm/skinny_gemm.h"

// Plans of streaming GEMMs as text: 64x2 (rows × columns), sN stages, gN grid, wN whole, cN cluster, eN early, pN
// prefetch.
namespace aotllm::cuda {

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find(at, begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

/// Whether `text` is a change of a plan.
inline bool change(SkinnyPlan& plan, const std::string& text) {
  int first = 0;
  int second = 0;
  if (std::sscanf(text.c_str(), "%dx%d", &first, &second) == 2) return plan.rows = first, plan.sub = second, true;
  if (text.size() < 2) return false;
  const int value = std::atoi(text.c_str() + 1);
  switch (text[0]) {
    case 's':
      return plan.stages = value, true;
    case 'g':
      return plan.grid = value, true;
    case 'w':
      return plan.whole = value != 0, true;
    case 'c':
      return plan.cluster = value, true;
    case 'e':
      return plan.early = value, true;
    case 'p':
      return plan.prefetch = value, true;
    default:
      return false;
  }
}

inline std::string describe(const SkinnyPlan& plan) {
  char text[96];
  std::snprintf(text, sizeof text, "%dx%d,s%d,g%d,w%d,c%d,e%d,p%d", plan.rows, plan.sub, plan.stages, plan.grid,
                plan.whole, plan.cluster, plan.early, plan.prefetch);
  return text;
}

}  // namespace aotllm::cuda
