#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "aotllm/constraint.h"
#include "aotllm/errors.h"
#include "constraint/grammar_state.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// The library recurses once for each link of a chain of references, and dies where the stack ends. This much takes
/// chains that fill max_text_bytes; pages that are not touched cost nothing.
constexpr std::size_t kStackBytes = std::size_t{512} << 20;

/// A fifth of the library's default. It bounds the memory of a state (about 2 kB for each) and the time that a long
/// forced text takes the loop.
constexpr std::size_t kMaxLexerStates = 50'000;

const char* kind_name(GrammarKind kind) {
  switch (kind) {
    case GrammarKind::kJsonSchema:
      return "json_schema";
    case GrammarKind::kRegex:
      return "regex";
    case GrammarKind::kLark:
      return "lark";
  }
  return "lark";
}

/// Runs `argument`'s attempt; for pthread_create.
template <typename Attempt>
void* run_attempt(void* argument) {
  const std::unique_ptr<std::shared_ptr<Attempt>> attempt(static_cast<std::shared_ptr<Attempt>*>(argument));
  (*attempt)->run();
  return nullptr;
}

/// A detached thread with a large stack. False where there is no room for it.
template <typename Attempt>
bool start_detached(std::shared_ptr<Attempt> attempt) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  auto argument = std::make_unique<std::shared_ptr<Attempt>>(std::move(attempt));
  pthread_t thread{};
  const bool started = pthread_create(&thread, &attributes, &run_attempt<Attempt>, argument.get()) == 0;
  pthread_attr_destroy(&attributes);
  if (started) {
    static_cast<void>(argument.release());  // the thread's now
  }
  return started;
}

}  // namespace

struct GrammarCompiler::State {
  State(const std::string& library_path, const GrammarVocabulary& vocabulary, GrammarLimits grammar_limits)
      : environment(std::make_shared<const GrammarEnvironment>(library_path, vocabulary)), limits(grammar_limits) {}

  const std::shared_ptr<const GrammarEnvironment> environment;
  const GrammarLimits limits;
  std::mutex mutex;
  std::int32_t abandoned = 0;  ///< attempts that nobody waits for
};

namespace {

/// One compilation, on a thread of its own. Whoever waits and the thread share it.
template <typename State>
class Attempt {
 public:
  Attempt(std::shared_ptr<State> state, Grammar grammar) : state_(std::move(state)), grammar_(std::move(grammar)) {}

  void run() noexcept {
    std::unique_ptr<Constraint> result;
    std::optional<Error> failure;
    try {
      result = compile();
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception& error) {
      failure = Error(ErrorKind::kInternal, error.what());
    }
    const std::lock_guard lock(state_->mutex);
    result_ = std::move(result);
    failure_ = std::move(failure);
    done_ = true;
    state_->abandoned -= abandoned_ ? 1 : 0;
    changed_.notify_all();
  }

  /// The result, or none after limits.max_compile_seconds; the attempt is abandoned then.
  std::unique_ptr<Constraint> wait() {
    std::unique_lock lock(state_->mutex);
    const std::chrono::duration<double> patience(state_->limits.max_compile_seconds);
    if (!changed_.wait_for(lock, patience, [this] { return done_; })) {
      abandoned_ = true;
      ++state_->abandoned;
      throw Error(ErrorKind::kInvalidRequest,
                  cat(grammar_.param, " takes more than ", patience.count(), " s to compile; use a simpler grammar"),
                  grammar_.param);
    }
    if (failure_) {
      throw *failure_;
    }
    return std::move(result_);
  }

 private:
  std::unique_ptr<Constraint> compile() const {
    const llguidance::Library& library = state_->environment->library();
    llguidance::MatcherInit init{};
    library.constraint_init_set_defaults(&init, state_->environment->tokenizer());
    init.log_stderr_level = 0;
    init.limits.verbose_errors = false;
    init.limits.max_lexer_states = kMaxLexerStates;
    GrammarState::MatcherPtr matcher(library.new_matcher(&init, kind_name(grammar_.kind), grammar_.text.c_str()),
                                     GrammarState::FreeMatcher{state_->environment});
    if (const char* error = library.matcher_get_error(matcher.get())) {
      throw Error(ErrorKind::kInvalidRequest, cat(grammar_.param, " does not compile: ", plain_reason(error)),
                  grammar_.param);
    }
    auto start = std::make_unique<GrammarState>(std::move(matcher), grammar_.param);
    // Some grammars that nothing meets are only found out here. What the library works out on the way is in the clones.
    std::vector<std::uint32_t> mask(state_->environment->mask_words());
    start->fill_mask(mask);
    return start;
  }

  const std::shared_ptr<State> state_;
  const Grammar grammar_;
  std::condition_variable changed_;
  bool done_ = false;  // these under state_->mutex
  bool abandoned_ = false;
  std::unique_ptr<Constraint> result_;
  std::optional<Error> failure_;
};

}  // namespace

GrammarCompiler::GrammarCompiler(const std::string& library_path, const GrammarVocabulary& vocabulary,
                                 GrammarLimits limits)
    : state_(std::make_shared<State>(library_path, vocabulary, limits)) {}

GrammarCompiler::~GrammarCompiler() = default;

std::unique_ptr<Constraint> GrammarCompiler::compile(const Grammar& grammar) const {
  const std::string& param = grammar.param;
  if (grammar.text.size() > state_->limits.max_text_bytes) {
    throw Error(
        ErrorKind::kInvalidRequest,
        cat(param, " is ", grammar.text.size(), " bytes long; at most ", state_->limits.max_text_bytes, " are allowed"),
        param);
  }
  if (grammar.text.find('\0') != std::string::npos) {
    throw Error(ErrorKind::kInvalidRequest, param + " holds a NUL character, which no grammar may; escape it", param);
  }
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->abandoned >= state_->limits.max_abandoned) {
      throw Error(ErrorKind::kOverloaded, "too many grammars take too long to compile; try again later");
    }
  }
  const auto attempt = std::make_shared<Attempt<State>>(state_, grammar);
  if (!start_detached(attempt)) {
    throw Error(ErrorKind::kOverloaded, "there is no memory to compile a grammar with; try again later");
  }
  return attempt->wait();
}

const std::string& GrammarCompiler::library_version() const noexcept {
  return state_->environment->library().version;
}

}  // namespace aotllm
