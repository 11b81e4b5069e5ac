#include "aotllm/prefix_key.h"

#include <utility>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

/// The finalizer of SplitMix64 (Steele et al., 2014): a bijection in which each bit of the input changes half of the
/// output's.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::uint64_t low_bits(TokenId token) {
  return static_cast<std::uint32_t>(token);
}

std::uint64_t realm_seed(const PrefixRealm& realm) {
  std::uint64_t hash = mix(low_bits(realm.adapter) << 32 ^ realm.salt.size());
  for (const char c : realm.salt) {
    hash = mix(hash ^ static_cast<unsigned char>(c));
  }
  return hash;
}

/// Two tokens at a time; the number of tokens is the same for all blocks, so that it needs no place in the hash.
std::uint64_t block_key(std::uint64_t hash, std::span<const TokenId> block) {
  std::size_t i = 0;
  for (; i + 1 < block.size(); i += 2) {
    hash = mix(hash ^ (low_bits(block[i]) | low_bits(block[i + 1]) << 32));
  }
  return i < block.size() ? mix(hash ^ low_bits(block[i])) : hash;
}

}  // namespace

PrefixKeys::PrefixKeys(PrefixRealm realm, std::int32_t tokens_per_block)
    : realm_(std::move(realm)), tokens_per_block_(tokens_per_block), seed_(realm_seed(realm_)) {
  if (tokens_per_block < 1) {
    throw Error(ErrorKind::kInternal,
                "prefix keys with tokens_per_block " + std::to_string(tokens_per_block) + "; it must be ≥ 1");
  }
}

void PrefixKeys::extend(std::span<const TokenId> tokens) {
  const auto block_size = static_cast<std::size_t>(tokens_per_block_);
  const std::size_t num_blocks = tokens.size() / block_size;
  for (std::size_t i = blocks_.size(); i < num_blocks; ++i) {
    blocks_.push_back(block_key(blocks_.empty() ? seed_ : blocks_.back(), tokens.subspan(i * block_size, block_size)));
  }
}

}  // namespace aotllm
