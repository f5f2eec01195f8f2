// SPDX-License-Identifier: MIT
#include "expert_exchange/options.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/launch.hpp>

#include <charconv>
#include <limits>

namespace bellows::bench {

const char* const kExchangeHelp =
    R"(bench_expert_exchange: tokens to the ranks of their experts and back, forward and backward, through the
program's own mpirun, or among the ranks of the mpirun or srun that started it.

  --ranks N              ranks that it starts (default 2)
  --tokens N             of each rank (default 1024)
  --sweep A:B            A, 2A, 4A, ... up to B tokens of each rank, in one table, in place of --tokens
  --senders N            only the first N ranks have tokens: with one of two each link is busy in one direction
                         (default: all; not with --mode ll)
  --hidden N             elements of a token, a multiple of 8 (default 7168)
  --topk N               different experts of each token, chosen at random (default 8)
  --experts N            of all ranks (default 256)
  --dtype bf16|f32|fp8   of tokens and results (default bf16); fp8: bf16 tokens travel as E4M3 with a scale for 128
                         elements, results and gradients in bf16
  --layout expert|rank   rows of the experts: grouped by expert, a row for each expert of a token (default), or by
                         the rank that they come from, a token once
  --mode ht|ll           high throughput (default), or low latency: fixed places for --tokens of each rank, rows
                         masked or (--layout rank) as they come, forward only
  --sums type|f32|exact  sums of a rank's rows travel back in the type of the results (default), as f32, or as f32 and
                         summed along a tree over the experts, alike for all layouts of ranks; not with --layout rank
  --ranks-per-node N     pretends that so many consecutive ranks make a node: MPI between them, and tokens travel
                         once to each (where nodes have equally many ranks, more than one)
  --flat                 tokens travel once to each rank, also across nodes
  --device-link K        auto (default): from device to device, where a vendor's driver links them; off; host:
                         through host memory (CPU devices)
  --workgroups N         most workgroups of a kernel that packs or unpacks rows (default 0: as many as serve)
  --piece N              KiB that are copied between device and host at once, at most (default 4096)
  --seed N               of tokens and routing (default 1)
  --seconds S            least time of each phase (default 0.5)
  --beside GxMxNxK       G FP8 products of M rows by N by K, weights prepacked, as a layer of another micro-batch runs
                         between sending and receiving: how much slower they are, how much of the exchange they
                         hide; times of kernels are taken from the start
  --trace FILE           the last dispatch and combine of all ranks (with --beside: the products alone, and one
                         of each beside them) for chrome://tracing or ui.perfetto.dev; times of
                         kernels are taken from the start, which costs a little

Every rank first checks what arrives and what comes back; a wrong result is shown, and nothing is timed.

us       median of the repeats (5 or more); of each the longest of all ranks, from the call to the end of its wait
min-max  the least and the largest of the same, us
p99      of the same, in low-latency mode
algbw    GB/s of the rows that a rank receives, its own among them, a token once per rank whatever number of
         its experts live there; bytes of the elements, or of codes and scales, alone, mean of the ranks. ll: rows
         of all tokens, which go to every rank
busbw    algbw * (ranks - 1) / ranks
wire     GB/s that come to a rank from others while records move, in the mean of those that get some: without
         packing, without waiting for counts or for the device
MB       really sent to other ranks, of all ranks together and of each in the mean; of all, to ranks of other nodes
dedup    share of the rows of all tokens' experts that need no row of their own on the way
fp8      share of the bytes of those that are left that need not travel, as codes and scales are fewer
raw      time of MPI_Alltoallv over the phase's: of the same tokens in bf16, a row for each of their experts,
         in host memory; its algbw counts those rows
CPU s    of all ranks together, per repeat

memcpy: all ranks copy at once as many bytes as they send by one alltoallv; bytes count once.
to_host, from_host, to_and_from_host: all ranks copy at once, between their device and host memory, as many bytes of
--dtype as others send to one rank at most; algbw of one direction: the most that `wire` can be without a device link.
Exit codes: 0 all right, 1 a wrong result, 2 bad usage, 3 no device or MPI that serves, 4 a lost rank.
)";

namespace {

DType dtype_of(const std::string& text) {
    for (const DType dtype : {DType::BF16, DType::F32})
        if (text == to_string(dtype))
            return dtype;
    throw Error(ErrorCode::InvalidArgument, "--dtype " + text + " is none of bf16, f32 and fp8");
}

bool by_rank(const std::string& layout) {
    if (layout != "expert" && layout != "rank")
        throw Error(ErrorCode::InvalidArgument,
                    "--layout " + layout + " is neither expert nor rank");
    return layout == "rank";
}

double seconds_of(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != 0 || !(value > 0 && value <= 3600))
        throw Error(ErrorCode::InvalidArgument, "--seconds " + text + " is no time; see --help");
    return value;
}

/// --sums, into a shape that knows its layout.
void take_sums(ExchangeShape& shape, const std::string& sums) {
    if (sums != "type" && sums != "f32" && sums != "exact")
        throw Error(ErrorCode::InvalidArgument, "--sums " + sums + " is none of type, f32, exact");
    if (sums != "type" && shape.by_rank)
        throw Error(ErrorCode::InvalidArgument,
                    "--sums " + sums + " is for rows by expert, not for --layout rank");
    shape.exact_sums = sums == "exact";
    shape.sum_dtype = sums == "type" ? shape.dtype : DType::F32;
}

constexpr std::uint64_t kMost = std::uint64_t{1} << 30;

/// Tokens of each rank, one measurement after the other.
std::vector<std::uint64_t> take_sweep(Arguments& arguments, std::uint64_t tokens) {
    const auto text = arguments.value("--sweep");
    if (!text)
        return {tokens};
    const auto parts = Arguments::split(*text, ':');
    std::vector<std::uint64_t> ends;
    for (const std::string& part : parts) {
        std::uint64_t number = 0;
        const auto read = std::from_chars(part.data(), part.data() + part.size(), number);
        if (read.ec == std::errc() && read.ptr == part.data() + part.size())
            ends.push_back(number);
    }
    if (parts.size() != 2 || ends.size() != 2 || ends[0] < 1 || ends[0] > ends[1] ||
        ends[1] > kMost)
        throw Error(ErrorCode::InvalidArgument,
                    "--sweep takes FIRST:LAST numbers of tokens, e.g. 64:16384, not " + *text);
    std::vector<std::uint64_t> sweep;
    for (std::uint64_t at = ends[0]; at <= ends[1]; at *= 2)
        sweep.push_back(at);
    return sweep;
}

ExchangeShape take_shape(Arguments& arguments) {
    ExchangeShape shape;
    const std::uint64_t launched = is_launched() ? static_cast<std::uint64_t>(launched_size()) : 0;
    shape.ranks = arguments.number("--ranks", launched > 0 ? launched : shape.ranks, 1, 4096);
    shape.tokens = arguments.number("--tokens", shape.tokens, 1, kMost);
    shape.senders = arguments.number("--senders", 0, 1, shape.ranks);
    shape.hidden = arguments.number("--hidden", shape.hidden, 8, kMost);
    shape.top_k = arguments.number("--topk", shape.top_k, 1, 64);
    shape.experts = arguments.number("--experts", shape.experts, 1, kMost);
    shape.seed = arguments.number("--seed", shape.seed, 0);
    const std::string dtype = arguments.value("--dtype").value_or("bf16");
    shape.codes = dtype == "fp8";
    shape.dtype = shape.codes ? DType::BF16 : dtype_of(dtype);
    shape.by_rank = by_rank(arguments.value("--layout").value_or("expert"));
    take_sums(shape, arguments.value("--sums").value_or("type"));
    const auto refuse = [](const std::string& why) {
        throw Error(ErrorCode::InvalidArgument, why);
    };
    if (launched > 0 && shape.ranks != launched)
        refuse("--ranks " + std::to_string(shape.ranks) + " among " + std::to_string(launched) +
               " ranks that have been started");
    if (shape.hidden % 8 != 0)
        refuse("--hidden " + std::to_string(shape.hidden) + " is no multiple of 8");
    if (shape.top_k > shape.experts)
        refuse("--topk " + std::to_string(shape.top_k) + " of --experts " +
               std::to_string(shape.experts));
    if (shape.ranks > shape.experts)
        refuse("--experts " + std::to_string(shape.experts) + " for --ranks " +
               std::to_string(shape.ranks) + ": a rank would have none");
    return shape;
}

} // namespace

std::string name_of(const ExchangeShape& shape) {
    return std::to_string(shape.ranks) + "x" + std::to_string(shape.tokens) + "x" +
           std::to_string(shape.hidden) + "x" + std::to_string(shape.experts) + "x" +
           std::to_string(shape.top_k) + "/" + (shape.codes ? "fp8" : to_string(shape.dtype)) +
           (shape.by_rank ? "/rank" : "") + (shape.low_latency ? "/ll" : "") +
           (shape.exact_sums                 ? "/exact"
            : shape.sum_dtype != shape.dtype ? "/sums-f32"
                                             : "") +
           (shape.num_senders() < shape.ranks ? "/senders" + std::to_string(shape.senders) : "");
}

ExchangeOptions take_exchange_options(Arguments& arguments) {
    ExchangeOptions options;
    const std::string mode = arguments.value("--mode").value_or("ht");
    if (mode != "ht" && mode != "ll")
        throw Error(ErrorCode::InvalidArgument,
                    "--mode " + mode + " is neither ht (high throughput) nor ll (low latency)");
    options.shape = take_shape(arguments);
    options.shape.low_latency = mode == "ll";
    if (options.shape.low_latency && options.shape.num_senders() < options.shape.ranks)
        throw Error(ErrorCode::InvalidArgument,
                    "--senders " + std::to_string(options.shape.senders) +
                        " with --mode ll, which sends the records of --tokens tokens all the same");
    if (const auto ranks = arguments.number("--ranks-per-node", 0, 1, 4096); ranks > 0)
        options.ranks_per_node = static_cast<int>(ranks);
    options.flat = arguments.flag("--flat");
    options.device_link = device_link_kind(arguments.value("--device-link").value_or("auto"));
    options.workgroups = static_cast<std::uint32_t>(
        arguments.number("--workgroups", 0, 0, std::numeric_limits<std::uint32_t>::max()));
    options.piece_kib = arguments.number("--piece", 0, 1, std::uint64_t{1} << 40);
    const CommonOptions common = take_common_options(arguments);
    options.repeats = common.repeats.value_or(options.repeats);
    options.filter = common;
    if (const auto seconds = arguments.value("--seconds"))
        options.seconds = seconds_of(*seconds);
    if (common.device)
        options.devices = Arguments::split(*common.device);
    if (const auto shapes = arguments.sizes("--beside", "GxMxNxK")) {
        if (shapes->size() != 1)
            throw Error(ErrorCode::InvalidArgument, "--beside takes one shape; see --help");
        options.beside = shapes->front();
    }
    if (options.beside && common.filter)
        throw Error(ErrorCode::InvalidArgument, "--beside needs all phases, without --filter");
    options.json = common.json;
    options.sweep = take_sweep(arguments, options.shape.tokens);
    options.trace = arguments.value("--trace");
    if (arguments.rest().size() > 1)
        throw Error(ErrorCode::InvalidArgument,
                    "\"" + arguments.rest()[1] + "\" is no option; see --help");
    return options;
}

} // namespace bellows::bench
