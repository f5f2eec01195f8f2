// SPDX-License-Identifier: MIT
// Prefill and decoding of a serving engine. `--help` lists the options.

#include "ranks/ranks.hpp"
#include "serve/bound.hpp"
#include "support/common_options.hpp"
#include "support/peaks.hpp"
#include "support/program.hpp"
#include "support/spread.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/memory_sizes.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/checkpoint/expert_tables.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/serve/engine.hpp>
#include <bellows/shape/eplb.hpp>
#include <bellows/train/train_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace bellows::bench {
namespace {

const char* const kHelp =
    R"(bench_serve: how fast an engine reads prompts and writes tokens, on one device or on several ranks. Rows go by llama-bench's
names:
  pp512            a prompt of 512 tokens, until its first token is there
  pp2048@d4096     the same behind 4096 tokens that are in the cache
  tg128            128 tokens of one sequence, one after another; tg128@d4096 behind 4096 tokens
  b64              64 sequences at once, from 512 tokens each to 576: tokens per second of all together
  hit512           a prompt of 512 tokens whose whole blocks the cache has
  gap64            64 sequences as b64: the 99th percentile of the time between two tokens, beside the median
  gap64+pp2048     the same while a prompt of 2048 tokens comes every 16 steps
A prompt's tokens are random, and no two prompts begin alike.

  --config NAME        a preset or a file, as `bellows train` takes it (default v2-lite; tiny on CPUs)
  --random             random weights of that shape, which is what there is without --checkpoint
  --checkpoint DIR     the weights of a run or of a Hugging Face folder
  --rows R,...         (default pp512,pp2048,pp2048@d4096,tg128,tg128@d4096,b8,b32,b64,b256; small ones on CPUs)
  --precision f32|bf16|fp8   (default bf16)
  --cache-type f32|bf16|fp8  (default: as activations)
  --exact              answers have the same bits alone and beside others
  --draft mtp          a module of multi-token prediction guesses the token behind the next one
  --accept X           with it: this share of the drafts is accepted, right or wrong; answers are of no use then
  --one-by-one         a step begins when the one before has ended (without EngineOptions::overlap_steps)
  --budget N           tokens of a step (default 2048)
  --ranks N            ranks that share the experts, each with the rows' sequences (default 1); --device may be a list
  --exchange-tokens N  of a rank that travel to the experts at once (default 256)
  --placement FILE     which expert each slot of the ranks holds, as `bellows plan experts --distinct --json` prints it
  --slots N            of all ranks, more than experts: replicas placed for even loads; with random weights
  --kernels            also shows each kernel's time in a prompt or a step, by timestamps, which cost some time; with --one-by-one

ms          of the whole prompt, or of a step that writes a token of each sequence; of gap rows the median of all steps, and
            instead of the least and the most the 99th percentile and its ratio to the median
of bound    the time in which a read loop of the same run would read what a step must: the weights that its tokens meet,
            and their keys and values
tokens/s    of all ranks together
Before rows are timed, tokens that were written one by one are compared with those that prompts of all tokens before them
give, with --exact bit by bit; the engine's counters must agree with what was asked for.
)";

struct Row {
    std::string name;
    std::uint64_t prompt = 0, tokens = 0, depth = 0, batch = 1;
    bool hit = false, gaps = false;
    std::uint64_t beside = 0; ///< tokens of prompts that come meanwhile
};

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why + "; see bench_serve --help");
}

std::uint64_t number_of(const std::string& word, std::size_t from) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 24;
    std::uint64_t value = 0;
    for (std::size_t i = from; i < word.size(); ++i) {
        if (word[i] < '0' || word[i] > '9' || value > kMost)
            refuse("--rows: \"" + word + "\" is no row");
        value = 10 * value + static_cast<std::uint64_t>(word[i] - '0');
    }
    if (word.size() <= from || value == 0 || value > kMost)
        refuse("--rows: \"" + word + "\" is no row");
    return value;
}

double share_of(const std::string& word) {
    double share = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), share);
    if (error != std::errc() || end != word.data() + word.size() || !(share >= 0 && share <= 1))
        refuse("--accept is a share from 0 to 1, not \"" + word + "\"");
    return share;
}

Row parse_row(const std::string& name) {
    Row row{.name = name};
    std::string word = name;
    if (const std::size_t at = word.find("@d"); at != std::string::npos) {
        row.depth = number_of(word, at + 2);
        word = word.substr(0, at);
    }
    if (const std::size_t plus = word.find("+pp"); plus != std::string::npos) {
        row.beside = number_of(word, plus + 3);
        word = word.substr(0, plus);
    }
    if (word.starts_with("pp")) {
        row.prompt = number_of(word, 2);
    } else if (word.starts_with("hit")) {
        row.prompt = number_of(word, 3);
        row.hit = true;
    } else if (word.starts_with("gap")) {
        row.batch = number_of(word, 3);
        row.prompt = 512;
        row.tokens = 128;
        row.gaps = true;
    } else if (word.starts_with("tg")) {
        row.tokens = number_of(word, 2);
        row.prompt = 1;
    } else if (word.starts_with("b")) {
        row.batch = number_of(word, 1);
        row.prompt = 512;
        row.tokens = 64;
    } else {
        refuse("--rows: \"" + name + "\" is no row");
    }
    return row;
}

struct Options {
    CommonOptions common;
    std::string config;
    std::uint64_t slots = 0;
    std::optional<std::string> checkpoint;
    std::vector<Row> rows;
    EngineOptions engine;
    bool kernels = false;
};

struct Result {
    std::string name;
    Spread seconds;  ///< of a prompt, or of a step
    double rate = 0; ///< tokens per second
    double of_bound = 0;
    double late = 0; ///< of gaps: the 99th percentile, in seconds
};

class Bench {
public:
    Bench(Engine& engine, const Options& options, const World& world)
        : engine_(engine), options_(options), ranks_(static_cast<double>(world.size())),
          random_(11 + static_cast<unsigned>(world.rank())) {}

    void check();
    Result time(const Row& row);
    /// Prints the kernels of the last row that was timed.
    void print_kernels() const;
    void set_read_rate(double bytes_per_second) { read_rate_ = bytes_per_second; }

private:
    std::vector<std::uint32_t> text(std::uint64_t count) {
        std::vector<std::uint32_t> tokens(count);
        for (std::uint32_t& token : tokens)
            token = static_cast<std::uint32_t>(random_() % engine_.model().vocabulary);
        return tokens;
    }
    RequestId submit(std::vector<std::uint32_t> prompt, std::uint64_t tokens) {
        Request request;
        request.prompt = std::move(prompt);
        request.max_tokens = tokens;
        request.ignore_end = true;
        request.log_probs = true;
        return engine_.submit(std::move(request));
    }
    double step() {
        const auto start = std::chrono::steady_clock::now();
        if (!engine_.step())
            throw Error(ErrorCode::Internal, "an engine with requests has nothing to do");
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    AnswerPart finish(RequestId id);
    /// Adds what the device did since the trace was taken last.
    void take_kernels(std::uint64_t steps);
    Result time_prompt(const Row& row);
    Result time_tokens(const Row& row);

    Engine& engine_;
    const Options& options_;
    double ranks_; ///< which do the same at the same time
    std::mt19937 random_;
    double read_rate_ = 0;
    struct Kernel {
        double seconds = 0;
        std::uint64_t count = 0;
    };
    std::map<std::string, Kernel> kernels_; ///< of a prompt or a step, by part and name
    double span_ = 0;
};

void Bench::take_kernels(std::uint64_t steps) {
    kernels_.clear();
    std::vector<TraceEvent> events = engine_.device().take_trace();
    std::erase_if(events, [](const TraceEvent& event) { return event.is_job(); });
    span_ = 0;
    for (const TraceEvent& event : events) {
        Kernel& kernel = kernels_[event.category + " " + event.name];
        kernel.seconds +=
            1e-9 * static_cast<double>(event.end_ns - event.begin_ns) / static_cast<double>(steps);
        ++kernel.count;
    }
    for (auto& [name, kernel] : kernels_) {
        kernel.count /= steps;
        span_ += kernel.seconds;
    }
}

void Bench::print_kernels() const {
    std::vector<std::pair<std::string, Kernel>> order(kernels_.begin(), kernels_.end());
    std::ranges::sort(order, std::greater<>(), [](const auto& k) { return k.second.seconds; });
    std::printf("  all kernels %.0f us\n", 1e6 * span_);
    for (const auto& [name, kernel] : order)
        if (kernel.seconds > 0.004 * span_)
            std::printf("  %-52s %9.1f us %5.1f %%  %llu times\n", name.c_str(),
                        1e6 * kernel.seconds, 100 * kernel.seconds / span_,
                        static_cast<unsigned long long>(kernel.count));
}

AnswerPart Bench::finish(RequestId id) {
    AnswerPart all;
    for (;;) {
        AnswerPart part = engine_.poll(id);
        all.tokens.insert(all.tokens.end(), part.tokens.begin(), part.tokens.end());
        all.log_probs.insert(all.log_probs.end(), part.log_probs.begin(), part.log_probs.end());
        all.usage = part.usage;
        if (part.reason != FinishReason::None) {
            all.reason = part.reason;
            return all;
        }
        (void)step();
    }
}

void Bench::check() {
    if (options_.engine.forced_acceptance)
        return;
    constexpr std::uint64_t kPrompt = 70, kTokens = 8;
    std::vector<std::uint32_t> tokens = text(kPrompt);
    const AnswerPart one_by_one = finish(submit(tokens, kTokens));
    if (one_by_one.tokens.size() != kTokens || one_by_one.reason != FinishReason::Length)
        throw Error(ErrorCode::Internal, "an answer has not the tokens that were asked for");
    // Rounding moves a log-probability; another token or position would move it by far more.
    const double tolerance = options_.engine.exact                          ? 0
                             : options_.engine.precision == Precision::F32  ? 1e-3
                             : options_.engine.precision == Precision::BF16 ? 0.1
                                                                            : 0.3;
    for (std::uint64_t i = 0; i < kTokens; ++i) {
        const AnswerPart at_once = finish(submit(tokens, 1));
        const double one = one_by_one.log_probs[i].front().log_prob,
                     other = at_once.log_probs[0].front().log_prob;
        if (!(std::abs(one - other) <= tolerance))
            throw Error(ErrorCode::Internal, "token " + std::to_string(i) +
                                                 " has log-probability " + std::to_string(one) +
                                                 " from the cache, " + std::to_string(other) +
                                                 " without");
        tokens.push_back(one_by_one.tokens[i]);
    }
}

Result Bench::time_prompt(const Row& row) {
    std::vector<double> seconds;
    for (std::uint64_t i = 0; i <= options_.common.repeats.value_or(5); ++i) {
        const std::vector<std::uint32_t> behind = text(row.depth);
        if (row.depth > 0)
            (void)finish(submit(behind, 1));
        std::vector<std::uint32_t> prompt = behind;
        const std::vector<std::uint32_t> own = text(row.prompt);
        prompt.insert(prompt.end(), own.begin(), own.end());
        const std::uint64_t known =
            (row.hit ? row.prompt : row.depth) / kBlockTokens * kBlockTokens;
        if (row.hit)
            (void)finish(submit(prompt, 1));
        const RequestId id = submit(std::move(prompt), 1);
        if (options_.kernels)
            (void)engine_.device().take_trace();
        double sum = 0;
        AnswerPart part;
        while ((part = engine_.poll(id)).reason == FinishReason::None)
            sum += step();
        // At least one token is computed.
        if (part.usage.cached != std::min(known, row.depth + row.prompt - 1) ||
            part.tokens.size() != 1)
            throw Error(ErrorCode::Internal, "a prompt was not found in the cache as it should be");
        if (options_.kernels)
            take_kernels(1);
        if (i > 0) // the first makes the recordings
            seconds.push_back(sum);
    }
    const Spread spread = spread_of(seconds);
    return {row.name, spread, ranks_ * static_cast<double>(row.prompt) / spread.median, 0, 0};
}

Result Bench::time_tokens(const Row& row) {
    std::vector<double> seconds;
    double written = 0; // tokens of a sequence in all steps that count
    std::uint64_t counted = 0;
    // The first round of a batch makes recordings, meanwhile a device's clocks fall.
    const bool warms = row.batch > 1;
    const std::uint64_t repeats = warms ? 2 : options_.common.repeats.value_or(3);
    for (std::uint64_t i = 0; i < repeats; ++i) {
        // Prompts are in the cache, so that all sequences begin to write in the same few steps.
        std::vector<std::vector<std::uint32_t>> prompts;
        for (std::uint64_t b = 0; b < row.batch; ++b) {
            prompts.push_back(text(row.depth + row.prompt));
            (void)finish(submit(prompts.back(), 1));
        }
        const std::uint64_t late =
            div_up(row.batch * kBlockTokens, options_.engine.token_budget - row.batch + 1);
        const std::uint64_t tokens = row.tokens + late + 8;
        std::vector<RequestId> ids;
        for (std::vector<std::uint32_t>& prompt : prompts)
            ids.push_back(submit(std::move(prompt), tokens));
        std::vector<double> steps;
        std::vector<RequestId> prompts_beside;
        for (std::uint64_t number = 0;; ++number) {
            const EngineCounters before = engine_.counters();
            if (before.running + before.waiting == 0)
                break;
            if (row.beside > 0 && number % 16 == 15 && steps.size() < row.tokens)
                prompts_beside.push_back(submit(text(row.beside), 1));
            const double time = step();
            const EngineCounters after = engine_.counters();
            const std::uint64_t drawn = after.generated_tokens - before.generated_tokens,
                                computed = after.computed_tokens - before.computed_tokens,
                                drafted = after.drafted - before.drafted,
                                accepted = after.accepted - before.accepted;
            const bool drafts = options_.engine.draft != DraftKind::None;
            const bool all_write = drawn == row.batch + accepted &&
                                   computed == row.batch + drafted &&
                                   drafted == (drafts ? row.batch : 0);
            if (row.gaps ? drawn < row.batch || steps.size() == row.tokens : !all_write)
                continue;
            steps.push_back(time);
            written += static_cast<double>(drawn) / static_cast<double>(row.batch);
            ++counted;
            if (options_.kernels)
                take_kernels(1);
        }
        for (const RequestId id : prompts_beside)
            (void)engine_.poll(id);
        for (const RequestId id : ids)
            if (const AnswerPart part = engine_.poll(id); part.tokens.size() != tokens)
                throw Error(ErrorCode::Internal, "an answer has not its tokens");
        if (steps.size() < row.tokens / 4)
            throw Error(ErrorCode::Internal, row.name + ": too few steps wrote all sequences");
        if (!warms || i > 0)
            seconds.insert(seconds.end(), steps.begin() + (warms ? 0 : 4), steps.end());
    }
    const Spread spread = spread_of(seconds);
    const double of_sequence = row.gaps ? 1 : written / static_cast<double>(counted);
    Result result{row.name, spread,
                  ranks_ * static_cast<double>(row.batch) * of_sequence / spread.median, 0, 0};
    if (row.gaps) {
        std::ranges::sort(seconds);
        result.late = seconds[std::min(seconds.size() - 1, seconds.size() * 99 / 100)];
    }
    const EngineOptions& o = options_.engine;
    const DType cache = o.cache_type.value_or(activation_type(*o.precision));
    if (read_rate_ > 0 && ranks_ == 1) // of several, each has a part of the weights
        result.of_bound = bytes_of_step(engine_.model(), *o.precision, cache, row.batch,
                                        row.depth + row.prompt + row.tokens / 2) /
                          read_rate_ / spread.median;
    return result;
}

Result Bench::time(const Row& row) {
    return row.tokens > 0 ? time_tokens(row) : time_prompt(row);
}

/// Takes what is left of the command line. On a CPU small sizes are usual.
void take_options(Arguments& arguments, bool cpu, Options& options) {
    options.config = arguments.value("--config").value_or(cpu ? "tiny" : "v2-lite");
    (void)arguments.flag("--random");
    options.checkpoint = arguments.value("--checkpoint");
    const std::string usual = cpu ? "pp64,tg32,tg32@d64,b4"
                                  : "pp512,pp2048,pp2048@d4096,tg128,tg128@d4096,b8,b32,b64,b256";
    for (const std::string& word : Arguments::split(arguments.value("--rows").value_or(usual)))
        options.rows.push_back(parse_row(word));
    options.engine.precision = Precision::BF16;
    if (const auto precision = arguments.value("--precision"))
        from_text(options.engine.precision.emplace(), *precision);
    if (const auto type = arguments.value("--cache-type")) {
        const std::map<std::string, DType> types = {
            {"f32", DType::F32}, {"bf16", DType::BF16}, {"fp8", DType::F8E4M3}};
        if (!types.contains(*type))
            refuse("--cache-type is f32, bf16 or fp8, not \"" + *type + "\"");
        options.engine.cache_type = types.at(*type);
    }
    options.engine.exact = arguments.flag("--exact");
    options.engine.draft = draft_kind(arguments.value("--draft").value_or("none"));
    if (const auto share = arguments.value("--accept"))
        options.engine.forced_acceptance = share_of(*share);
    options.kernels = arguments.flag("--kernels"); // of a step that has the device alone
    options.engine.overlap_steps = !arguments.flag("--one-by-one") && !options.kernels;
    options.engine.token_budget = arguments.number("--budget", 2048, 1, 1 << 20);
    options.engine.exchange_tokens = arguments.number("--exchange-tokens", 256, 1, 1 << 20);
    if (const auto file = arguments.value("--placement"))
        options.engine.placement = read_expert_tables(*file);
    options.slots = arguments.number("--slots", 0, 1, kMostExpertSlots);
    if (options.slots > 0 && (options.checkpoint || !options.engine.placement.empty()))
        refuse("--slots is for random weights, without --placement");
    std::uint64_t tokens = 0;
    for (const Row& row : options.rows) {
        constexpr std::uint64_t kLate = 64; // tokens that the first write beside the last prompts
        const std::uint64_t one =
            round_up(row.depth + row.prompt + row.tokens + kLate, kBlockTokens);
        options.engine.max_context = std::max({options.engine.max_context, one, row.beside + 1});
        options.engine.max_sequences = std::max(options.engine.max_sequences, row.batch + 8);
        tokens = std::max(tokens, (row.batch + 1) * one + row.depth + 4 * row.beside);
    }
    options.engine.max_context = std::max<std::uint64_t>(options.engine.max_context, 128);
    options.engine.cache_tokens = std::max(tokens, 2 * options.engine.max_context);
    if (arguments.rest().size() > 1)
        refuse("there is no option \"" + arguments.rest()[1] + "\"");
}

DeviceOptions device_of(const Options& options, const World& world) {
    return device_options_of_rank(options.common.device.value_or(kAnyDevice), world.local_rank());
}

std::unique_ptr<Engine> make_engine(const Options& options, const World& world) {
    DeviceOptions device = device_of(options, world);
    device.trace = options.kernels;
    if (options.checkpoint)
        return std::make_unique<Engine>(device, *options.checkpoint, options.engine);
    ModelConfig model = load_run_config(options.config).model;
    model.max_context = 0; // random weights know no context
    EngineOptions engine = options.engine;
    if (options.slots > 0) {
        const std::vector<double> even(model.routed_experts, 1.0);
        const EplbOptions eplb{.ranks = static_cast<std::uint64_t>(world.size()),
                               .replicas = options.slots,
                               .distinct = true};
        engine.placement.assign(model.moe_layers(),
                                rebalance_experts(even, eplb).placement.expert_of_slot);
    }
    return std::make_unique<Engine>(device, model, 1, engine);
}

/// On each rank.
std::string measure(World& world, Arguments arguments) {
    Options options;
    options.common = take_common_options(arguments);
    // What loops take is not the engine's memory.
    const auto loops = Device::create(device_of(options, world));
    take_options(arguments, loops->info().is_cpu, options);
    if (world.size() > 1)
        options.engine.world = &world;
    const bool first = world.rank() == 0;
    const Ceiling read = read_peak(*loops);
    const auto start = std::chrono::steady_clock::now();
    const auto engine = make_engine(options, world);
    const double loaded =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    Bench bench(*engine, options, world);
    bench.check();
    bench.set_read_rate(read.rate * 1e9);
    if (first) {
        std::printf("%d x %s, %s, weights in %.1f s, read loop %.0f GB/s\n", world.size(),
                    engine->device().info().name.c_str(),
                    options.checkpoint.value_or(options.config).c_str(), loaded, read.rate);
        std::printf("%-16s %12s %12s %20s %9s\n", "row", "tokens/s", "ms", "min-max", "of bound");
    }
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const Row& row : options.rows) {
        if (!options.common.wants(row.name))
            continue;
        raise_clock(*loops);
        const Result result = bench.time(row);
        if (!first)
            continue;
        const Spread ms = result.seconds.scaled(1e3);
        char gaps[48];
        std::snprintf(gaps, sizeof gaps, "%.4g %.2f x", 1e3 * result.late,
                      result.late / result.seconds.median);
        std::printf("%-16s %12.1f %12.3f %20s ", result.name.c_str(), result.rate, ms.median,
                    result.late > 0 ? gaps : range_text(ms).c_str());
        if (result.of_bound > 0)
            std::printf("%7.1f %%\n", 100 * result.of_bound);
        else
            std::printf("%9s\n", "-");
        std::fflush(stdout);
        if (options.kernels)
            bench.print_kernels();
        all.push_back({{"row", result.name},
                       {"tokens_per_s", result.rate},
                       {"ms", ms.median},
                       {"least_ms", ms.least},
                       {"most_ms", ms.most},
                       {"of_bound", result.of_bound},
                       {"late_ms", 1e3 * result.late}});
    }
    if (!first)
        return "";
    const MemoryReport report = engine->memory_report();
    const double kept = static_cast<double>(report.of(MemoryCategory::Weights).bytes +
                                            report.of(MemoryCategory::Cache).bytes);
    std::printf("memory: %s; weights and cache and %.1f %%\n",
                describe_memory(report.peaks()).c_str(),
                100 * (static_cast<double>(report.peak_bytes) / kept - 1));
    if (options.common.json)
        write_file_durably(*options.common.json, all.dump(1) + "\n");
    return "";
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows::bench;
    return run_ranks("bench_serve", kHelp, argc, argv, [](int count, char** words) {
        Arguments arguments(count, words);
        const std::uint64_t ranks = arguments.number("--ranks", 1, 1, 4096);
        return RanksToRun{
            ranks, {}, [arguments](bellows::World& world) { return measure(world, arguments); }};
    });
}
