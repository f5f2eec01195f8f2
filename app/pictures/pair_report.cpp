// SPDX-License-Identifier: MIT
#include "app/pictures/pair_report.hpp"

#include "app/pictures/gantt.hpp"
#include "app/pictures/schedule_report.hpp"
#include "app/trace_file.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <sstream>
#include <utility>

namespace bellows {

namespace {

using Json = nlohmann::ordered_json;

std::string hidden_of(const PairTimes& times) {
    const std::string share =
        times.exchange > 0 ? printed(" (%.1f %%)", 100 * times.hidden / times.exchange) : "";
    return number(times.hidden) + " of " + number(times.exchange) + share;
}

constexpr double kAttention = 1, kRouter = 0.1, kShared = 0.3, kMlp = 1;
constexpr double kUnset = -1;

template <class Nodes, class F>
void for_each_node(Nodes& nodes, F&& what) {
    for (auto* part : {&nodes.forward, &nodes.input_gradient, &nodes.weight_gradient})
        for (auto& node : *part)
            what(node);
}

/// With the times of a forward that computes.
PairNodes moe_layer() {
    PairNodes layer = moe_layer_nodes();
    for_each_node(layer, [](PairNode& node) {
        node.seconds = node.name == "ATTN(F)"     ? kAttention
                       : node.name == "ROUTER(F)" ? kRouter
                       : node.name == "SHARED(F)" ? kShared
                       : node.name == "MLP(F)"    ? kMlp
                                                  : kUnset;
    });
    return layer;
}

/// "MLP(B)" → "mlp.b".
std::string key_of(const std::string& name) {
    std::string key = name.substr(0, name.size() - 1);
    std::ranges::replace(key, '(', '.');
    std::ranges::transform(key, key.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return key;
}

/// "MLP(B)" → "MLP".
std::string stem_of(const std::string& name) {
    return name.substr(0, name.find('('));
}

void set_cost(PairNodes& layer, const std::string& entry) {
    const std::size_t equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    std::string all;
    bool found = false;
    for_each_node(layer, [&](PairNode& node) {
        const std::string name = key_of(node.name);
        all += (all.empty() ? "" : ", ") + name;
        if (name != key)
            return;
        node.seconds = parse_cost(key, equals == std::string::npos ? "" : entry.substr(equals + 1));
        found = true;
    });
    if (!found)
        throw Error(ErrorCode::InvalidArgument,
                    "--costs: there is no " + in_quotes(key) + " in a pair, there are " + all);
}

/// What has no time yet costs what the forward's node of its name does.
void fill_from_forward(PairNodes& layer) {
    std::map<std::string, double> forward;
    for (const PairNode& node : layer.forward)
        forward[stem_of(node.name)] = node.seconds;
    for_each_node(layer, [&](PairNode& node) {
        if (node.seconds == kUnset)
            node.seconds = forward[stem_of(node.name)];
    });
}

/// Dispatch and combine that have no time: a quarter each of all that computes.
void fill_exchanges(PairNodes& layer) {
    double compute = 0;
    for_each_node(layer, [&](const PairNode& node) {
        compute += node.resource == NodeResource::Compute ? node.seconds : 0;
    });
    for_each_node(layer, [&](PairNode& node) {
        if (node.seconds == kUnset)
            node.seconds = compute / 4;
    });
}

const char* color_of(OpKind kind) {
    return kind == OpKind::Forward         ? "#f6c85f"
           : kind == OpKind::InputGradient ? "#8fc1e3"
                                           : "#c3bcd6";
}

/// A node where it ran.
struct Placed {
    const PairNode* node = nullptr;
    OpKind kind = OpKind::Forward;
    std::size_t layer = 0; ///< as a forward counts
    OpTime time;
};

/// In the order of handing in.
std::vector<Placed> placed(const PairReport& report) {
    std::vector<Placed> all;
    std::map<OpKind, std::size_t> next;
    for (std::size_t i = 0; i < report.order.size(); ++i) {
        const OpKind kind = report.order[i];
        const std::size_t index = next[kind]++;
        const std::size_t layer = index / report.layer.of(kind).size();
        all.push_back({&report.nodes.of(kind)[index], kind,
                       kind == OpKind::Forward ? layer : report.layers - 1 - layer,
                       report.times.nodes[i]});
    }
    return all;
}

std::string full_name(const Placed& at) {
    return at.node->name + " of layer " + std::to_string(at.layer);
}

const char* lane_of(const Placed& at) {
    return at.node->resource == NodeResource::Compute ? "compute" : "exchange";
}

std::string title_of(const PairReport& report) {
    return "A pair of " + std::to_string(report.layers) +
           (report.layers == 1 ? " MoE layer" : " MoE layers") +
           ": the forward of one micro-batch and the backward of another";
}

} // namespace

PairNodes parse_pair_costs(const std::string& text) {
    PairNodes layer = moe_layer();
    std::istringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ',');)
        set_cost(layer, entry);
    PairNode &dispatch = layer.forward[2], &combine = layer.forward[5];
    if (dispatch.seconds == kUnset)
        dispatch.seconds = combine.seconds;
    if (combine.seconds == kUnset)
        combine.seconds = dispatch.seconds;
    fill_from_forward(layer);
    fill_exchanges(layer);
    return layer;
}

PairReport::PairReport(const PairOptions& options)
    : layer(options.layer), nodes(repeated(layer, options.layers)), layers(options.layers),
      chosen(!options.order) {
    if (options.order)
        check_names(*options.order);
    pattern = options.order ? *options.order : choose_pattern(layer, layers);
    order = interleave(nodes, pattern);
    times = simulate_pair(nodes, order);
    apart = simulate_pair(nodes, one_after_the_other(nodes));
}

double PairReport::bound() const {
    return std::max(times.compute, times.exchange);
}

std::string pair_text(const PairReport& report) {
    const PairTimes &times = report.times, &apart = report.apart;
    std::string text = title_of(report) + "\n\n" + (report.chosen ? "chosen" : "given") +
                       " order, round after round:\n" + to_text(report.pattern) + "\n\n";
    const auto line = [&](const char* name, double time, const std::string& note) {
        text += name + printed(" %10.6g  ", time) + note + "\n";
    };
    line("one after the other", apart.time, "exchange hidden: " + hidden_of(apart));
    line("overlapped         ", times.time,
         "exchange hidden: " + hidden_of(times) +
             (times.time > 0 ? printed("; %.2f times as fast", apart.time / times.time) : ""));
    line("bound              ", report.bound(),
         "the longer of compute, " + number(times.compute) + ", and exchange, " +
             number(times.exchange));
    return text;
}

std::string pair_json(const PairReport& report) {
    Json nodes = Json::array();
    for (const Placed& at : placed(report))
        nodes.push_back({{"name", at.node->name},
                         {"layer", at.layer},
                         {"resource", lane_of(at)},
                         {"start", at.time.start},
                         {"end", at.time.end}});
    const auto summary = [](const PairTimes& times) {
        return Json{{"time", times.time}, {"hidden", times.hidden}};
    };
    const Json all = {{"layers", report.layers},
                      {"order", report.pattern},
                      {"chosen", report.chosen},
                      {"compute", report.times.compute},
                      {"exchange", report.times.exchange},
                      {"bound", report.bound()},
                      {"one_after_the_other", summary(report.apart)},
                      {"overlapped", summary(report.times)},
                      {"nodes", std::move(nodes)}};
    return all.dump(1) + "\n";
}

std::string pair_svg(const PairReport& report) {
    const PairTimes& times = report.times;
    GanttChart chart;
    chart.title = title_of(report);
    chart.subtitle = "simulated: " + number(times.time) + ", one after the other " +
                     number(report.apart.time) + ", bound " + number(report.bound()) +
                     "; exchange hidden: " + hidden_of(times);
    chart.x_label = "time in units of the costs";
    chart.rows = {{"compute", number(times.time - times.compute) + " idle", {}},
                  {"exchange", number(times.time - times.exchange) + " idle", {}}};
    for (const Placed& at : placed(report))
        chart.rows[at.node->resource == NodeResource::Compute ? 0 : 1].bars.push_back(
            {at.time.start, at.time.end, stem_of(at.node->name), full_name(at), color_of(at.kind)});
    for (const auto& [name, kind] :
         {std::pair("forward", OpKind::Forward), std::pair("input gradient", OpKind::InputGradient),
          std::pair("weight gradient", OpKind::WeightGradient)})
        chart.legend.emplace_back(name, color_of(kind));
    return gantt_svg(chart);
}

std::string pair_trace(const PairReport& report) {
    constexpr double kNanoseconds = 1e6;
    std::vector<TraceEvent> events;
    for (const Placed& at : placed(report))
        events.push_back({.lane = lane_of(at),
                          .name = at.node->name,
                          .category = "layer " + std::to_string(at.layer),
                          .begin_ns = std::llround(at.time.start * kNanoseconds),
                          .end_ns = std::llround(at.time.end * kNanoseconds)});
    const std::array<std::string, 1> parts = {trace_of_rank(events, 0)};
    return trace_document(parts);
}

} // namespace bellows
