// SPDX-License-Identifier: MIT
#include "app/trace_file.hpp"

#include <bellows/base/files.hpp>
#include <bellows/comm/host_collectives.hpp>

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <utility>

namespace bellows {

namespace {

using Json = nlohmann::json;

Json name_event(const char* what, int pid, int tid, const std::string& name) {
    return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

} // namespace

std::string trace_of_rank(const std::vector<TraceEvent>& events, int rank) {
    std::map<std::string, int> lanes;
    std::string text = name_event("process_name", rank, 0, "rank " + std::to_string(rank)).dump();
    for (const TraceEvent& event : events) {
        const auto [lane, added] = lanes.emplace(event.lane, static_cast<int>(lanes.size()) + 1);
        if (added)
            text += ",\n" + name_event("thread_name", rank, lane->second, event.lane).dump();
        Json args = {{"node", event.category}};
        if (!event.op.empty())
            args["op"] = event.op;
        if (!event.by.empty())
            args["by"] = event.by;
        const Json json = {{"ph", "X"},
                           {"name", event.name},
                           {"cat", event.category},
                           {"pid", rank},
                           {"tid", lane->second},
                           {"ts", static_cast<double>(event.begin_ns) / 1000.0},
                           {"dur", static_cast<double>(event.end_ns - event.begin_ns) / 1000.0},
                           {"args", std::move(args)}};
        text += ",\n" + json.dump();
    }
    return text;
}

std::string trace_document(std::span<const std::string> ranks) {
    std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
        text += (rank == 0 ? "" : ",\n") + ranks[rank];
    return text + "\n]}\n";
}

void write_trace(const std::filesystem::path& path, const std::vector<TraceEvent>& events,
                 World& world) {
    HostCollectives everyone(world, Group::all(world.size()));
    const std::string mine = trace_of_rank(events, world.rank());
    const auto parts = everyone.all_gather(std::as_bytes(std::span(mine)));
    if (world.rank() != 0)
        return;
    std::vector<std::string> ranks;
    for (const auto& part : parts)
        ranks.emplace_back(reinterpret_cast<const char*>(part.data()), part.size());
    write_file_durably(path, trace_document(ranks));
}

} // namespace bellows
