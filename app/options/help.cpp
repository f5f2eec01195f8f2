// SPDX-License-Identifier: MIT
#include "app/options/help.hpp"

#include <sstream>
#include <utility>
#include <vector>

namespace bellows {

namespace {

constexpr std::size_t kNames = 26; // columns of names and types, where they fit

constexpr const char* kExitCodes = R"(
Exit codes:
  0  good
  1  wrong result
  2  bad input or usage
  3  no device that serves
  4  a peer was lost
  5  stopped by a signal and saved
  6  the last checkpoint could not be written
  7  the gradient or the loss stays non-finite
)";

/// "  NAMES" and the description beside it, or below where the names are long.
std::string entry(const std::string& names, const std::string& description) {
    std::string text = "  " + names;
    std::size_t begin = kNames;
    if (description.empty())
        return text + "\n";
    if (text.size() + 2 > kNames) {
        text += "\n" + std::string(kNames, ' ');
    } else {
        text.resize(kNames, ' ');
    }
    return text + wrapped(description, kHelpColumns, kNames, begin) + "\n";
}

} // namespace

std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent,
                    std::size_t begin) {
    std::istringstream words{std::string(text)};
    std::string out;
    std::size_t column = begin;
    bool first_of_line = true;
    for (std::string word; words >> word;) {
        if (!first_of_line && column + 1 + word.size() > columns) {
            out += "\n" + std::string(indent, ' ');
            column = indent;
            first_of_line = true;
        }
        out += (first_of_line ? "" : " ") + word;
        column += (first_of_line ? 0 : 1) + word.size();
        first_of_line = false;
    }
    return out;
}

std::string help_footer(std::string_view text) {
    std::istringstream lines{std::string(text) + kExitCodes};
    std::string out, paragraph;
    const auto end_paragraph = [&] {
        if (!paragraph.empty())
            out += wrapped(paragraph, kHelpColumns, 0, 0) + "\n";
        paragraph.clear();
    };
    for (std::string line; std::getline(lines, line);) {
        if (!line.empty() && line.front() != ' ') {
            paragraph += line + " ";
            continue;
        }
        end_paragraph();
        out += line + "\n";
    }
    end_paragraph();
    return out;
}

HelpFormatter::HelpFormatter() {
    label("UINT", "N");
    label("FLOAT", "X");
    label("REQUIRED", "(needed)");
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name,
                                     CLI::AppFormatMode mode) const {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at = text.find("\n\n\n"); at != std::string::npos;
         at = text.find("\n\n\n", at))
        text.erase(at, 1);
    return text;
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
    return entry(make_option_name(option, is_positional) + make_option_opts(option),
                 make_option_desc(option));
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
    return entry(command->get_name(), command->get_description());
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
    return "\n" + help_footer(app->get_footer());
}

const char* const kMainHelp =
    R"(`bellows COMMAND --help` says more, with examples. Of a flag that is given twice the last one
counts; --data and --set collect.
)";

const char* const kTrainHelp = R"(Examples:
  bellows train --config tiny --data /usr/share/common-licenses --ranks 4 \
      --steps 400 --out runs/demo
  bellows train --resume runs/demo --steps 800
  bellows train --resume runs/demo/checkpoints/step-200 --steps 800
  bellows train --config tiny --data corpus/ --out runs/b --lr 1e-3 \
      --holdout 0.05 --eval-every 100 --set model.layers=6
  mpirun -n 8 bellows train --config my.toml --data corpus/ --steps 1000 \
      --pp 2 --out runs/a

The configuration has a [model] and a [train] table; `bellows config --dump tiny` shows all keys.
--set changes any of them, other flags go before it, and config.toml in the run's folder says what
the run used. A run whose estimated memory does not fit is refused.

Keys of [train] without a flag are schedules of the learning rate (lr_schedule, decay_start,
lr_steps, lr_factors), a batch that grows (batch_start, batch_increment, batch_ramp_steps) and
attention that stays within documents (document_mask).

Ctrl-C (SIGINT) or SIGTERM ends the step, writes a checkpoint and exits with code 5; a second one
ends the run at once. Under your own mpirun or srun, SIGUSR1 to any rank does that.

A run that goes on from another than its newest checkpoint keeps the newer ones as
checkpoints/step-N.abandoned, unless --out names another folder.

The run's folder gets metrics.jsonl with a line per step: step, loss_nats_per_token (as loss, too),
loss_nats_per_byte (the same divided by the bytes of a token), held_out_loss and
held_out_loss_nats_per_byte (of steps after which it was looked at), grad_norm (before clipping),
lr, tokens_per_s, seconds, model_flops_per_s (three times the forward pass, causal, of all ranks),
model_flops_per_s_per_rank, mfu (its share of --peak-tflops, or of what the device's matrix units
were measured to do), parts (seconds in which rank 0's device worked on attention, experts,
exchange, reductions, optimizer and the rest, and on any of them as `device`), sequences (of the
step, with batch_start), bytes_exchanged (sent by all ranks together) and seconds_waited (for other ranks: what exchange, reductions, pipes and host collectives of a rank did
nothing but wait, added up, mean over the ranks; they run side by side, so the sum may exceed
`seconds`). For each layer with experts, `experts` has max_over_mean (the load of the fullest expert
divided by the mean), ranks_max_over_mean (the same of the rows per rank), entropy (of the loads, 1
is even), dropped (with capacity_factor, the share of choices) and, of every step or every tenth,
loads (tokens by expert, over the whole batch). `moves` are experts that came to other ranks before
the step (--eplb-every).
Also loss.svg, experts.svg (the same over all steps, of models with experts), trace.json (the last
two steps of all ranks, each piece of work with its op of the schedule; opens in Perfetto), of
several ranks report.svg (how the last step went through their pipeline), and checkpoints/step-N.
)";

const char* const kGenerateHelp =
    R"(On a terminal, control characters that the model writes are shown as \xNN; a pipe or a file gets its
bytes as they are.

Examples:
  bellows generate --checkpoint runs/demo --prompt "This license " \
      --tokens 300
  bellows generate --checkpoint runs/demo/checkpoints/step-400 --prompt "" \
      --tokens 50 --temperature 0
  bellows generate --checkpoint DeepSeek-V2-Lite --prompt "Once " \
      --tokens 50 --precision bf16
  bellows generate --checkpoint Qwen3-0.6B --chat --prompt "What is bf16?" \
      --tokens 200
  bellows generate --checkpoint Qwen3-0.6B --chat --prompts questions.txt \
      --tokens 200 --json > answers.jsonl

Standard error says how many tokens per second the prompts and the texts had.
)";

const char* const kChatHelp =
    R"(Each line of standard input is a message, which the model answers. Ctrl-C stops an answer, /clear
begins a new conversation, /exit or Ctrl-D ends.

Examples:
  bellows chat --checkpoint Qwen3-0.6B
  bellows chat --checkpoint DeepSeek-V2-Lite-Chat --precision fp8 \
      --system "You answer in one sentence." --temperature 0
)";

const char* const kExportHelp =
    R"(Writes config.json, generation_config.json, safetensors with an index, and the tokenizer's files, as
transformers and other programs read them. Of a Hugging Face folder, tensors whose type does not
change keep their bytes. The folder appears when it is complete.

Examples:
  bellows export --checkpoint runs/demo --out demo-bf16 --dtype bf16
  bellows export --checkpoint DeepSeek-V2-Lite --out v2-lite-fp8 \
      --dtype fp8 --shard-size 2GB
)";

const char* const kInfoHelp = R"(Examples:
  bellows info
  bellows info --json --device 0
  bellows info --kernels --device gpu
  bellows info --model tiny
  bellows info --model my.toml
  bellows info --model DeepSeek-V2-Lite

--kernels times each way of computing FP8 products that a device has, at sizes of decoding and of
training, and then in other tiles, which give the same bits; that takes up to a minute once, and is
kept in the user's cache folder for all devices of one name. Runs take the fastest variant whose
bits are those of the usual one, and their checkpoints keep the choice; with
BELLOWS_FP8_VARIANTS=measured they take the fastest, with =decoded one that every device has. Tiles
are not part of the choice: each device takes those that were fastest there. Linear layers in bf16
take the direct variant on GPUs with matrix units of bf16; BELLOWS_BF16_VARIANTS=decoded (products
through workgroup memory), =direct or =measured say otherwise, and checkpoints keep that choice.
)";

const char* const kSelftestHelp =
    R"(Checks every codec, op and FP8 product against f64 arithmetic on the host, the expert exchange in
f32, bf16 and FP8 on one rank and on two, and that a small training run gives the same bits however
its work is ordered. At its end it says what it does not cover on this device. error/bound is
the largest error in units of what rounding allows; above 1 is wrong. Under mpirun or srun, exchange
and training are checked among the ranks that are there.

Examples:
  bellows selftest
  bellows selftest --device gpu --json selftest.json
  mpirun -n 4 bellows selftest
)";

const char* const kScheduleHelp =
    R"(Text is one line per rank: F forward, B backward, I and W its halves, the gradients of inputs and of
weights, with the rank's chunk (phase) behind them; F0&B1 is a pair that may overlap. Below stand
the simulated step time, the bubble (what a rank idles) and how many chunks' activations each rank
keeps. svg is a picture, trace opens in ui.perfetto.dev, json has all of it.

Costs are per op of a chunk: f, i, w, fb of a pair (unless given f + i + w), p2p until a message is
there, transfer while it takes its link. With --compare they are of a rank's share of the model, of
which a chunk costs its part.

--pair shows what one of DualPipe's pairs hides: the forward of one micro-batch and the backward of
another, MoE layers both, whose nodes alternate so that the tokens of one travel while the other
computes. Costs are then of nodes: attn, router, dispatch, shared, mlp and combine with .f for the
forward and .b for the gradients of inputs; attn.w, shared.w and mlp.w for those of weights. Without
a cost, gradients take what the forward takes, and exchanges together as long as all that computes.
--order is the order of a pair of layers, repeated: each name hands in the nodes up to the next one
of that name.

Kinds: gpipe, 1f1b, interleaved (a multiple of as many micro-batches as ranks), zb-h1, zb-h2, zb-v,
dualpipe (an even number of ranks and of micro-batches, at least twice as many as ranks), dualpipev
(at least twice as many micro-batches as ranks).

Examples:
  bellows schedule --kind dualpipe --ranks 8 --micro-batches 20
  bellows schedule --kind zb-v --ranks 4 --micro-batches 12 --format svg \
      --out zb-v.svg
  bellows schedule --compare --ranks 8 --micro-batches 32 \
      --costs f=10,i=11,w=9,fb=25,p2p=0.5
  bellows schedule --kind 1f1b --ranks 2 --micro-batches 4 \
      --costs f=1,i=1,w=1:f=2,i=2,w=1
  bellows schedule --pair --costs attn.f=2,mlp.f=1,dispatch.f=1.5,mlp.w=0.8
  bellows schedule --pair --layers 2 \
      --order 'MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)'
  bellows schedule --pair --format svg --out pair.svg
)";

const char* const kPlanHelp = R"(`bellows plan experts --help` says more, with examples.
)";

const char* const kPlanExpertsHelp =
    R"(Each rank has slots for experts. Experts with a high load get replicas, among which their load is
shared evenly, and replicas are placed so that ranks have about the same load. The algorithm is that
of DeepSeek's EPLB. The file of loads says how much each expert of each layer has to do, in any unit,
such as tokens:

  {"loads": [[90, 132, 40, 61], [20, 107, 104, 64]]}

Where nodes divide the groups, each group of experts stays on one node, as routing limited to few
groups needs it; otherwise groups and nodes make no difference. Slots that ranks do not divide are
rounded up, and as many stay free (-1).

The table shows for each layer the highest load of a rank over the mean, 1 is best: before with one
replica of each expert in contiguous blocks, after with this placement. Behind it are the experts
with the highest loads, with their share of the load and their replicas. JSON has

  {"physical_to_logical": [[expert of each slot, rank by rank] of each layer],
   "max_over_mean": [of each layer]}

Two replicas of an expert on one rank balance nothing, and no exchange takes them. EPLB may place
them so; with --distinct they stand apart, and slots that could only hold a second one stay free.

Examples:
  bellows plan experts --loads loads.json --ranks 8 --slots 16
  bellows plan experts --loads loads.json --groups 4 --nodes 2 --ranks 8 \
      --slots 16 --json > placement.json
  bellows plan experts --loads loads.json --ranks 4 --slots 37 --distinct
)";

const char* const kConfigHelp = R"(Examples:
  bellows config --list
  bellows config --dump tiny > my.toml
)";

const char* const kCompletionHelp =
    R"(Prints a script that lets bash complete commands, flags and their values. An installed Bellows has
it in share/bash-completion/completions.

Example:
  source <(bellows completion bash)
)";

} // namespace bellows
