#include "aotllm/engine.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "engine/plan.h"
#include "engine/safetensors.h"
#include "support/free_memory.h"
#include "support/mapped_file.h"
#include "support/page_buffer.h"

namespace aotllm {
namespace {

ModelShape shape_of(const Plan& plan) {
  ModelShape shape;
  shape.vocab_size = plan.vocab_size;
  shape.hidden_size = plan.hidden_size;
  shape.num_layers = static_cast<std::int32_t>(plan.kv.layers.size());
  shape.max_seq_len = plan.max_seq_len;
  shape.max_num_tokens = plan.max_num_tokens;
  shape.max_batch_size = plan.max_batch_size;
  shape.tokens_per_block = plan.kv.tokens_per_block;
  for (const KvGroup& group : plan.kv.groups) {
    KvGroupShape& out = shape.kv_groups.emplace_back(KvGroupShape{group.window, 0});
    for (const int layer : group.layers) out.bytes_per_block += 2 * plan.kv.block_bytes(plan.kv.layers[layer]);
  }
  return shape;
}

/// Steps read all of a file: it is brought in and mapped at once, where it fits in what is free.
void populate(const MappedFile& file) {
  const std::optional<std::int64_t> free = free_memory();
  if (!free || std::ssize(file.bytes()) <= *free) file.populate();
}

}  // namespace

struct Engine::Impl {
  using Storage = std::variant<MappedFile, PageBuffer>;

  Impl(Storage bytes, std::span<const std::uint8_t> view, const std::string& path)
      : Impl(std::move(bytes), SafeTensors::parse(view, path)) {}
  Impl(Storage bytes, const SafeTensors& file)
      : storage(std::move(bytes)),
        name(file.name()),
        build_id(file.find_metadata("build")),
        plan(parse_plan(file)),
        shape(shape_of(plan)) {}

  Storage storage;  ///< what the plan's views point into
  std::string name;
  std::string build_id;
  Plan plan;
  ModelShape shape;
};

Engine Engine::load(const std::string& rank_file) {
  MappedFile file(rank_file);
  const auto view = file.bytes();
  auto impl = std::make_unique<const Impl>(std::move(file), view, rank_file);
  if (impl->plan.target == Target::kCpu) populate(std::get<MappedFile>(impl->storage));
  return Engine(std::move(impl));
}

Engine Engine::from_bytes(std::span<const std::uint8_t> bytes, const std::string& name) {
  PageBuffer copy(bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.data());
  const std::span<const std::uint8_t> view(copy.data(), bytes.size());
  return Engine(std::make_unique<const Impl>(std::move(copy), view, name));
}

Engine::Engine(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

const ModelShape& Engine::shape() const noexcept {
  return impl_->shape;
}
const Plan& Engine::plan() const noexcept {
  return impl_->plan;
}
const std::string& Engine::name() const noexcept {
  return impl_->name;
}
const std::string& Engine::build_id() const noexcept {
  return impl_->build_id;
}

}  // namespace aotllm
