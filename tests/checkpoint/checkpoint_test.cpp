// SPDX-License-Identifier: MIT
#include "base/records/checked_json.hpp"
#include "base/records/checksum.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/files.hpp>
#include <bellows/checkpoint/checkpoint.hpp>

#include <nlohmann/json.hpp>

#include <csignal>

#include <sys/resource.h>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

void write_shard(const fs::path& path, const std::string& tensor, std::vector<float> values) {
    SafetensorsWriter writer(path, {{tensor, StoredType::F32, {values.size()}}});
    writer.write(tensor, std::as_bytes(std::span(values)));
    writer.finish();
}

CheckpointState state_at(std::uint64_t step) {
    CheckpointState state;
    state.step = step;
    state.seed = ~std::uint64_t{0};
    state.layout = {1, 2, 2};
    state.kernels = {{"gemm_nt", "f32"}};
    return state;
}

/// Three experts in four slots of two ranks, in two layers.
ExpertPlaces some_places() {
    ExpertPlaces places;
    for (const std::uint64_t layer : {1, 7}) {
        places.placements[layer] = {3, 2, 2, {0, 2, 1, layer == 7 ? 2 : kFreeSlot}};
        places.loads[layer] = {4, 1.5, 1e15};
    }
    places.placed_by[7] = {0, 8, 2};
    return places;
}

std::vector<std::string> shards() {
    return {shard_name("model", 0, 2), shard_name("model", 1, 2), shard_name("optimizer", 0, 1)};
}

fs::path write_checkpoint(const fs::path& run, std::uint64_t step, float value = 1) {
    begin_checkpoint(run, step);
    const fs::path folder = checkpoint_temporary(run, step);
    write_shard(folder / shards()[0], "embedding", {value, 2});
    write_shard(folder / shards()[1], "head", {3});
    write_shard(folder / shards()[2], "embedding.m", {4, 5});
    return commit_checkpoint(run, state_at(step), shards(), {{kConfigFile, "[train]\n"}});
}

std::size_t entries(const fs::path& folder) {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

float first_value(const Checkpoint& checkpoint) {
    std::vector<float> values(2);
    checkpoint.require("model", "embedding")
        .read("embedding", std::as_writable_bytes(std::span(values)));
    return values[0];
}

} // namespace

TEST(Checkpoint, ShardNames) {
    EXPECT_EQ(shard_name("model", 0, 1), "model.safetensors");
    EXPECT_EQ(shard_name("model", 1, 4), "model-00002-of-00004.safetensors");
    EXPECT_BELLOWS_ERROR(shard_name("model", 4, 4), InvalidArgument, "shard 4");
}

TEST(Checkpoint, ComesBackAsItWent) {
    TemporaryFolder run;
    const fs::path folder = write_checkpoint(run.path(), 10);
    EXPECT_EQ(folder, run.path() / "checkpoints" / "step-10");
    EXPECT_EQ(entries(run.path() / "checkpoints"), 1u) << "no temporary may stay";
    for (const fs::path& path : {folder, run.path(), run.path() / "checkpoints"}) {
        const Checkpoint checkpoint = Checkpoint::open(path);
        EXPECT_EQ(checkpoint.folder(), folder);
        const CheckpointState& state = checkpoint.state();
        EXPECT_EQ(state.step, 10u);
        EXPECT_EQ(state.seed, ~std::uint64_t{0});
        EXPECT_EQ(state.layout, (RunLayout{1, 2, 2}));
        EXPECT_EQ(state.kernels.at("gemm_nt"), "f32");
        EXPECT_EQ(checkpoint.text("config.toml"), "[train]\n");
        EXPECT_EQ(first_value(checkpoint), 1);
        ASSERT_EQ(checkpoint.tensors("model").size(), 2u);
        EXPECT_EQ(checkpoint.tensors("model")[1].name, "head");
        EXPECT_EQ(checkpoint.tensors("optimizer").size(), 1u);
        EXPECT_EQ(checkpoint.find("model", "embedding.m"), nullptr);
        EXPECT_NE(checkpoint.find("optimizer", "embedding.m"), nullptr);
        EXPECT_NO_THROW(checkpoint.verify());
        EXPECT_BELLOWS_ERROR(checkpoint.require("model", "none"), InvalidArgument, "none");
        EXPECT_BELLOWS_ERROR(checkpoint.text("none.toml"), InvalidArgument, "none.toml");
    }
    EXPECT_NE(content_of(folder / "model.safetensors.index.json").find("model-00002-of-00002"),
              std::string::npos);
}

TEST(Checkpoint, SaysWhereExpertsAre) {
    TemporaryFolder run;
    begin_checkpoint(run.path(), 2);
    CheckpointState state = state_at(2);
    state.experts = some_places();
    const fs::path folder = commit_checkpoint(run.path(), state, {}, {});
    EXPECT_EQ(Checkpoint::open(folder).state().experts, some_places());
    const auto written = nlohmann::json::parse(content_of(folder / "state.json"));
    const auto refused = [&](const char* key, const nlohmann::json& value) {
        SCOPED_TRACE(key + (" " + value.dump()));
        auto json = written;
        json["experts"][1][key] = value;
        run.write("checkpoints/step-2/state.json", format_checked(json));
        EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), Corrupt, "");
    };
    refused("expert_of_slot", {0, 2, 1});               // fewer than slots
    refused("expert_of_slot", {0, 0, 1, 2});            // one twice on a rank
    refused("expert_of_slot", {0, 1, 1, -1});           // one nowhere
    refused("expert_of_slot", {0, 2, 1, 3});            // none such
    refused("expert_of_slot", {0, 2, 1, 4294967298.5}); // no whole number
    refused("expert_of_slot", "0, 2, 1, 2");
    refused("slots", std::uint64_t{1} << 63);
    refused("ranks", 0);
    refused("loads", {4, -1, 2});
    refused("loads", nlohmann::json::array());
    refused("placed_by", {4, -1, 2});
    refused("placed_by", {4, 2});
    refused("layer", -1);
}

TEST(Checkpoint, ARunMeansItsNewestCompleteOne) {
    TemporaryFolder run;
    EXPECT_EQ(latest_checkpoint(run.path()), std::nullopt);
    EXPECT_BELLOWS_ERROR(Checkpoint::open(run.path()), InvalidArgument, "no checkpoint");
    EXPECT_BELLOWS_ERROR(Checkpoint::open(run.path() / "none"), InvalidArgument, "no checkpoint");
    write_checkpoint(run.path(), 9);
    write_checkpoint(run.path(), 100); // after 9 as a number, before it as text
    fs::create_directory(run.path() / "checkpoints" / "step-200");
    run.write("checkpoints/step-0300/state.json", "{}");
    run.write("checkpoints/step-x/state.json", "{}");
    run.write("checkpoints/step-99999999999999999999999/state.json", "{}");
    run.write("checkpoints/.step-400.tmp/state.json", "{}");
    EXPECT_EQ(latest_checkpoint(run.path()), run.path() / "checkpoints" / "step-100");
    EXPECT_EQ(Checkpoint::open(run.path()).state().step, 100u);
}

TEST(Checkpoint, IsFoundAndNamedAlikeHoweverItIsTyped) {
    TemporaryFolder run;
    const fs::path folder = fs::canonical(write_checkpoint(run.path(), 10));
    const fs::path link = run.path() / "link";
    fs::create_symlink(folder, link);
    for (const fs::path& path :
         {fs::path(folder.string() + "/"), folder / ".", fs::relative(folder), link,
          run.path() / "", run.path() / "checkpoints" / ""}) {
        const Checkpoint checkpoint = Checkpoint::open(path);
        EXPECT_EQ(checkpoint.folder(), folder) << path;
        EXPECT_EQ(run_of_checkpoint(checkpoint.folder()), fs::canonical(run.path())) << path;
    }
    EXPECT_EQ(run_of_checkpoint(run.path() / "checkpoints" / "step-10.old"), std::nullopt);
    EXPECT_EQ(run_of_checkpoint(run.path() / "step-10"), std::nullopt);
}

TEST(Checkpoint, BeginRemovesStaleTemporaries) {
    TemporaryFolder run;
    run.write("checkpoints/.step-5.tmp/model.safetensors", "half");
    run.write("checkpoints/.step-6.tmp.old/x", "half");
    begin_checkpoint(run.path(), 7);
    EXPECT_EQ(entries(run.path() / "checkpoints"), 1u);
    EXPECT_TRUE(fs::is_empty(checkpoint_temporary(run.path(), 7)));
    abandon_checkpoint(run.path(), 7);
    EXPECT_EQ(entries(run.path() / "checkpoints"), 0u);
}

TEST(Checkpoint, TheSameStepIsReplaced) {
    TemporaryFolder run;
    write_checkpoint(run.path(), 3, 1);
    write_checkpoint(run.path(), 3, 7);
    EXPECT_EQ(first_value(Checkpoint::open(run.path())), 7);
    EXPECT_EQ(entries(run.path() / "checkpoints"), 1u);
}

TEST(Checkpoint, PruneKeepsTheNewest) {
    TemporaryFolder run;
    for (const std::uint64_t step : {5, 10, 15, 20}) {
        write_checkpoint(run.path(), step);
    }
    prune_checkpoints(run.path(), 2, checkpoint_folder(run.path(), 5));
    EXPECT_EQ(
        list_checkpoints(run.path()),
        (std::vector<fs::path>{checkpoint_folder(run.path(), 20), checkpoint_folder(run.path(), 15),
                               checkpoint_folder(run.path(), 5)}));
    prune_checkpoints(run.path(), 2);
    EXPECT_EQ(entries(run.path() / "checkpoints"), 2u);
    EXPECT_TRUE(fs::exists(run.path() / "checkpoints" / "step-15"));
    EXPECT_TRUE(fs::exists(run.path() / "checkpoints" / "step-20"));
}

TEST(Checkpoint, NewerOnesAreSetAsideWhole) {
    TemporaryFolder run;
    const fs::path checkpoints = run.path() / "checkpoints";
    for (const std::uint64_t step : {5, 10, 15}) {
        write_checkpoint(run.path(), step, static_cast<float>(step));
    }
    run.write("metrics.jsonl", "lines\n");
    EXPECT_TRUE(set_aside_newer_checkpoints(run.path(), 15).empty());
    EXPECT_EQ(entries(checkpoints), 3u);
    EXPECT_EQ(set_aside_newer_checkpoints(run.path(), 5),
              (std::vector<fs::path>{checkpoints / "step-15.abandoned",
                                     checkpoints / "step-10.abandoned"}));
    EXPECT_EQ(latest_checkpoint(run.path()), checkpoints / "step-5");
    EXPECT_EQ(content_of(checkpoints / "step-15.abandoned" / "metrics.jsonl"), "lines\n");
    // The other branch's checkpoints have the same numbers; neither pruning nor another going back
    // touches what was set aside first.
    write_checkpoint(run.path(), 10, 70);
    EXPECT_EQ(set_aside_newer_checkpoints(run.path(), 5),
              (std::vector<fs::path>{checkpoints / "step-10.abandoned-2"}));
    write_checkpoint(run.path(), 10, 71);
    prune_checkpoints(run.path(), 1);
    EXPECT_FALSE(fs::exists(checkpoints / "step-5"));
    for (const auto& [name, value] : {std::pair("step-10", 71.0f),
                                      {"step-10.abandoned", 10.0f},
                                      {"step-10.abandoned-2", 70.0f},
                                      {"step-15.abandoned", 15.0f}}) {
        const Checkpoint checkpoint = Checkpoint::open(checkpoints / name);
        EXPECT_NO_THROW(checkpoint.verify()) << name;
        EXPECT_EQ(first_value(checkpoint), value) << name;
    }
}

TEST(Checkpoint, CommitRefusesMissingOrUnfinishedShards) {
    TemporaryFolder run;
    write_checkpoint(run.path(), 1);
    begin_checkpoint(run.path(), 2);
    EXPECT_BELLOWS_ERROR(commit_checkpoint(run.path(), state_at(2), {"model.safetensors"}, {}), Io,
                         "model.safetensors");
    EXPECT_FALSE(fs::exists(checkpoint_temporary(run.path(), 2)));
    begin_checkpoint(run.path(), 2);
    // A valid file without check sums: 8 bytes of length, "{}".
    run.write("checkpoints/.step-2.tmp/model.safetensors", std::string("\2\0\0\0\0\0\0\0{}", 10));
    EXPECT_BELLOWS_ERROR(commit_checkpoint(run.path(), state_at(2), {"model.safetensors"}, {}),
                         Corrupt, "not finished");
    EXPECT_EQ(Checkpoint::open(run.path()).state().step, 1u);
    begin_checkpoint(run.path(), 2);
    EXPECT_BELLOWS_ERROR(commit_checkpoint(run.path(), state_at(2), {}, {{"../x", "y"}}),
                         InvalidArgument, "../x");
}

// The disk fills while a shard or the state is written: an error, and the previous one stays.
TEST(Checkpoint, FullDiskLeavesThePreviousOne) {
    TemporaryFolder run;
    write_checkpoint(run.path(), 1);
    struct sigaction ignore{};
    struct sigaction before{};
    ignore.sa_handler = SIG_IGN;
    ASSERT_EQ(::sigaction(SIGXFSZ, &ignore, &before), 0);
    rlimit old{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
    for (const rlim_t limit : {rlim_t{100}, rlim_t{400}}) { // in a shard's header; in state.json
        const rlimit small{limit, old.rlim_max};
        ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
        EXPECT_BELLOWS_ERROR(write_checkpoint(run.path(), 2), Io, ".step-2.tmp");
        ::setrlimit(RLIMIT_FSIZE, &old);
        abandon_checkpoint(run.path(), 2);
        EXPECT_EQ(entries(run.path() / "checkpoints"), 1u);
        EXPECT_NO_THROW(Checkpoint::open(run.path()).verify());
        EXPECT_EQ(Checkpoint::open(run.path()).state().step, 1u);
    }
    ::sigaction(SIGXFSZ, &before, nullptr);
    write_checkpoint(run.path(), 2);
    EXPECT_EQ(Checkpoint::open(run.path()).state().step, 2u);
}

// Any file cut short, changed in any byte, or missing: refused as a whole.
TEST(Checkpoint, AnyDamageIsRefused) {
    TemporaryFolder run;
    const fs::path folder = write_checkpoint(run.path(), 1);
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) {
        files.push_back(entry.path());
    }
    ASSERT_EQ(files.size(), 6u);
    const auto open_all = [&] { Checkpoint::open(folder).verify(); };
    const auto refused = [&] {
        try {
            open_all();
        } catch (const Error& error) {
            EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
            return error.code() == ErrorCode::Corrupt || error.code() == ErrorCode::Io;
        }
        return false;
    };
    for (const fs::path& file : files) {
        const std::string good = content_of(file);
        const std::string name = file.filename().string();
        for (std::size_t at = 0; at < good.size(); ++at) {
            const bool blank = good[at] == ' ' || good[at] == '\n';
            if (name == "state.json" && blank) {
                continue; // blanks between JSON's tokens say nothing
            }
            std::string bad = good;
            bad[at] = static_cast<char>(bad[at] ^ 1);
            run.write("checkpoints/step-1/" + name, bad);
            ASSERT_TRUE(refused()) << name << " byte " << at;
        }
        for (const std::size_t size : {std::size_t{0}, good.size() / 2, good.size() - 2}) {
            run.write("checkpoints/step-1/" + name, good.substr(0, size));
            ASSERT_TRUE(refused()) << name << " cut to " << size;
        }
        if (name != "state.json") {
            fs::remove(file);
            ASSERT_TRUE(refused()) << name << " removed";
        }
        run.write("checkpoints/step-1/" + name, good);
        ASSERT_NO_THROW(open_all());
    }
}

// Checkpoints of earlier versions have keys that nobody reads any more.
TEST(Checkpoint, MoreKeysInTheStateAreNoDamage) {
    TemporaryFolder run;
    const fs::path folder = write_checkpoint(run.path(), 1);
    auto json = nlohmann::json::parse(content_of(folder / "state.json"));
    json["notes"]["loss"] = "2.5";
    json["checksum"] = hex32(0);
    const std::string text = json.dump();
    run.write("checkpoints/step-1/state.json", json.dump(2));
    EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), Corrupt, "check sum");
    json["checksum"] = hex32(crc32_of(text.data(), text.size()));
    run.write("checkpoints/step-1/state.json", json.dump(2));
    EXPECT_NO_THROW(Checkpoint::open(folder).verify());
}

// With check sums that fit, as a later version would write them.
TEST(Checkpoint, OfALaterFormatIsRefusedAsThat) {
    TemporaryFolder run;
    const fs::path folder = write_checkpoint(run.path(), 1);
    const std::string name = "checkpoints/step-1/state.json";
    const auto written = nlohmann::json::parse(content_of(folder / "state.json"));
    EXPECT_EQ(written.at("format"), 1);
    const auto write = [&](const nlohmann::json& format) {
        auto json = written;
        json["format"] = format;
        run.write(name, format_checked(json));
    };
    write(1);
    EXPECT_NO_THROW(Checkpoint::open(folder).verify());
    for (const std::uint64_t later : {std::uint64_t{2}, ~std::uint64_t{0}}) {
        write(later);
        EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), InvalidArgument,
                             "has format " + std::to_string(later) +
                                 ", this program knows 1; use a newer Bellows");
    }
    // Later versions may sum otherwise, or have other keys.
    run.write(name, "{\"format\": 2}");
    EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), InvalidArgument, "format 2");
    for (const char* format : {"0", "-1", "-2", "1.0", "2.5", "1e30", "\"1\"", "null", "true",
                               "[1]", "18446744073709551616"}) {
        SCOPED_TRACE(format);
        write(nlohmann::json::parse(format));
        EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), Corrupt, "format is ");
    }
    auto without = written;
    without.erase("format");
    run.write(name, format_checked(without));
    EXPECT_BELLOWS_ERROR(Checkpoint::open(folder), Corrupt, "missing");
}

TEST(Checkpoint, StateCannotLeadOutOfTheFolder) {
    TemporaryFolder run;
    run.write("step-1/state.json", std::string(100000, '['));
    EXPECT_BELLOWS_ERROR(Checkpoint::open(run.path() / "step-1"), Corrupt, "nested");
    run.write("step-1/state.json", "[]");
    EXPECT_BELLOWS_ERROR(Checkpoint::open(run.path() / "step-1"), Corrupt, "state.json");
}
