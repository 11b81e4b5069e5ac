#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "aotllm/model_runner.h"

namespace aotllm {

struct Plan;

/// One rank's engine file: mapped, checked and ready to run. Movable; pages are shared between processes.
class Engine {
 public:
  /// Maps and checks `rank_file`. A damaged file is refused, never a crash later. Throws Error(kEngine) naming file,
  /// place, what was expected and got, Error(kEngineIncompatible) where it is for another version or target.
  static Engine load(const std::string& rank_file);

  /// The same from bytes in memory, which are copied; `name` stands for the file in messages.
  static Engine from_bytes(std::span<const std::uint8_t> bytes, const std::string& name);

  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  const ModelShape& shape() const noexcept;
  /// The program of a step; lives as long as the engine, wherever it is moved.
  const Plan& plan() const noexcept;
  /// Path of the file, or what stands for it.
  const std::string& name() const noexcept;
  /// What the ranks of one build have in common, and no others; empty where the engine is one rank.
  const std::string& build_id() const noexcept;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<const Impl> impl);

  std::unique_ptr<const Impl> impl_;
};

}  // namespace aotllm
