// SPDX-License-Identifier: MIT
#include "app/generate/shared_texts.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <utility>

namespace bellows {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kTag = std::uint64_t{0x74} << 56;
constexpr std::chrono::minutes kLimit{10};

Json to_json(const std::vector<Written>& written, const WritingTimes& times) {
    Json texts = Json::array();
    for (const Written& one : written)
        texts.push_back({{"text", Json::binary({one.text.begin(), one.text.end()})},
                         {"tokens", one.tokens},
                         {"reason", one.reason},
                         {"degraded", one.degraded},
                         {"prompt", one.prompt_tokens},
                         {"cached", one.cached_tokens},
                         {"drafted", one.drafted},
                         {"accepted", one.accepted}});
    return {{"texts", texts},
            {"times",
             {times.prompt_tokens, times.tokens, times.prompt_seconds, times.seconds, times.drafted,
              times.accepted}}};
}

Written written_of(const Json& json) {
    const auto& text = json.at("text").get_binary();
    Written one;
    one.text.assign(text.begin(), text.end());
    json.at("tokens").get_to(one.tokens);
    json.at("reason").get_to(one.reason);
    json.at("degraded").get_to(one.degraded);
    json.at("prompt").get_to(one.prompt_tokens);
    json.at("cached").get_to(one.cached_tokens);
    json.at("drafted").get_to(one.drafted);
    json.at("accepted").get_to(one.accepted);
    return one;
}

/// Ranks write at the same time.
void add(WritingTimes& all, const Json& times) {
    all.prompt_tokens += times.at(0).get<std::uint64_t>();
    all.tokens += times.at(1).get<std::uint64_t>();
    all.prompt_seconds = std::max(all.prompt_seconds, times.at(2).get<double>());
    all.seconds = std::max(all.seconds, times.at(3).get<double>());
    all.drafted += times.at(4).get<std::uint64_t>();
    all.accepted += times.at(5).get<std::uint64_t>();
}

/// Returns what a rank has written, or nothing where it is lost.
Json received(World& world, int rank) {
    Json texts;
    (void)world.control().unless_lost(
        rank, [&] { texts = Json::from_cbor(world.control().recv(rank, kTag, kLimit)); });
    return texts;
}

} // namespace

bool gather_texts(World& world, std::size_t prompts, std::vector<Written>& written,
                  WritingTimes& times) {
    const int first = world.control().first_living();
    if (world.rank() != first) {
        const std::vector<std::uint8_t> bytes = Json::to_cbor(to_json(written, times));
        world.control().send(first, kTag, std::as_bytes(std::span(bytes)));
        return false;
    }
    Written lost;
    lost.reason = FinishReason::Failed;
    lost.degraded = true;
    std::vector<Written> all(prompts, lost);
    const auto ranks = static_cast<std::size_t>(world.size());
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        const bool own = static_cast<int>(rank) == world.rank();
        const Json from = own ? Json() : received(world, static_cast<int>(rank));
        for (std::size_t i = rank, k = 0; i < prompts; i += ranks, ++k)
            if (own)
                all[i] = std::move(written[k]);
            else if (!from.is_null())
                all[i] = written_of(from.at("texts").at(k));
        if (!from.is_null())
            add(times, from.at("times"));
    }
    written = std::move(all);
    return true;
}

} // namespace bellows
