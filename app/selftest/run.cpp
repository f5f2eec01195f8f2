// SPDX-License-Identifier: MIT
// The body of `bellows selftest`: the ops on one device in this process, exchange and training on
// one rank here and on two ranks that it starts itself. Under mpirun or srun it checks exchange and
// training among the ranks that are there.
#include "app/run.hpp"

#include "app/exit_code.hpp"
#include "app/mpi_info.hpp"
#include "app/relaunch.hpp"
#include "app/selftest/rows.hpp"
#include "app/selftest/suite.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/version.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/train/train_config.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>

#include <unistd.h>

namespace bellows {

namespace {

using namespace checks;
using namespace selftest;
using Clock = std::chrono::steady_clock;

/// In the environment of ranks that a self-test started: the file that takes their rows.
constexpr const char* kReportVariable = "BELLOWS_SELFTEST_REPORT";
/// Names a row whose first comparison is spoilt: a test of the self-test.
constexpr const char* kFaultVariable = "BELLOWS_SELFTEST_FAULT";
constexpr int kRanks = 2;

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

DeviceOptions device_options(const SelftestOptions& options, int local_rank) {
    DeviceOptions device = device_options_of_rank(options.device, local_rank);
    device.check_happens_before = true;
    device.poison_freed_memory = true;
    return device;
}

/// Exchange and training on two ranks of this device, started as a run's ranks are.
std::vector<Row> rows_of_two_ranks(const SelftestOptions& options) {
    const std::filesystem::path file = std::filesystem::temp_directory_path() /
                                       ("bellows-selftest-" + std::to_string(::getpid()) + ".json");
    Row failed;
    failed.group = "exchange";
    failed.what = "two ranks";
    failed.verdict = Verdict::Wrong;
    std::vector<Row> rows;
    try {
        ::setenv(kReportVariable, file.c_str(), 1);
        std::vector<std::string> arguments = {"selftest"};
        if (options.device != kAnyDevice)
            arguments.insert(arguments.end(), {"--device", options.device});
        const LaunchResult result = relaunch(kRanks, arguments);
        if (result.exit_code == 0)
            rows = rows_from_json(read_file(file, 1 << 20));
        else
            failed.note = result.reason + " (exit code " + std::to_string(result.exit_code) + ")";
    } catch (const Error& error) {
        failed.note = error.message();
        if (error.code() == ErrorCode::Unsupported || error.code() == ErrorCode::Mpi)
            failed.verdict = Verdict::Skipped; // no MPI that starts ranks
    }
    ::unsetenv(kReportVariable);
    std::error_code ignored;
    std::filesystem::remove(file, ignored);
    if (rows.empty())
        rows.push_back(failed);
    return rows;
}

/// On every rank under a launcher.
std::vector<Row> rows_among(World& world, const SelftestOptions& options,
                            const std::string& fault) {
    const DeviceOptions device = device_options(options, world.local_rank());
    std::vector<Row> rows = check_exchange(world, device, fault);
    for (Row& row : check_training(world, device, fault))
        rows.push_back(std::move(row));
    return rows;
}

void add_all(Table& table, const std::vector<Row>& rows) {
    for (const Row& row : rows)
        table.add(row);
}

/// The ops, each row on the device of the row before unless that one went wrong: a device may be
/// lost after it.
void run_ops(Table& table, const SelftestOptions& options, const std::string& fault,
             const std::vector<OpCheck>& checks, std::size_t total) {
    std::unique_ptr<Device> device;
    for (std::size_t i = 0; i < checks.size(); ++i) {
        table.begin(checks[i].what, i + 1, total);
        const Row row = run_row(checks[i].group, checks[i].what, fault, [&](Check& check) {
            if (!device)
                device = Device::create(device_options(options, 0));
            checks[i].body(check, OpRig(*device));
        });
        table.add(row);
        if (row.verdict == Verdict::Wrong)
            device.reset();
    }
}

/// Exchange and training on one rank, in this process.
std::vector<Row> rows_of_one_rank(const SelftestOptions& options, const std::string& fault) {
    try {
        World world = World::single();
        return rows_among(world, options, fault);
    } catch (const Error& error) {
        Row failed;
        failed.group = "exchange";
        failed.what = "one rank";
        failed.verdict = Verdict::Wrong;
        failed.note = std::string(to_string(error.code())) + ": " + error.message();
        return {failed};
    }
}

void run_here(Table& table, const SelftestOptions& options, const std::string& fault) {
    const std::vector<OpCheck> checks = op_checks(Depth::Quick);
    const std::size_t total = checks.size() + 2;
    run_ops(table, options, fault, checks, total);
    table.begin("exchange and training, 1 rank", total - 1, total);
    add_all(table, rows_of_one_rank(options, fault));
    table.begin("exchange and training, 2 ranks", total, total);
    add_all(table, rows_of_two_ranks(options));
}

/// What the report says of the device.
struct Tested {
    DeviceInfo info;
    std::vector<std::string> not_covered;

    explicit Tested(const Device& device)
        : info(device.info()), not_covered(selftest::not_covered(device)) {}
};

nlohmann::ordered_json report_of(const Table& table, const Tested& tested, const MpiInfo& mpi,
                                 double seconds) {
    const DeviceInfo& device = tested.info;
    return {{"bellows", kVersion},
            {"result", table.good() ? "good" : "wrong"},
            {"seconds", seconds},
            {"device",
             {{"name", device.name},
              {"driver", device.driver},
              {"vulkan", device.api_version},
              {"uuid", device.uuid},
              {"kind", device.is_cpu ? "cpu" : "gpu"},
              {"features", device.features},
              {"cooperative_matrices", device.cooperative_matrices}}},
            {"mpi",
             {{"library", mpi.library},
              {"standard", mpi.standard},
              {"thread_level", mpi.thread_level}}},
            {"not_covered", tested.not_covered},
            {"rows", nlohmann::ordered_json::parse(rows_to_json(table.rows()))}};
}

std::string versions(const DeviceInfo& device, const MpiInfo& mpi) {
    return std::string("bellows ") + kVersion + " on " + device.name + "\n  driver  " +
           device.driver + ", Vulkan " + device.api_version + "\n  MPI     " + mpi.library +
           "; thread level: " + mpi.thread_level + "\n";
}

int finish(Table& table, const SelftestOptions& options, const Tested& tested, const MpiInfo& mpi,
           double seconds) {
    table.finish();
    const auto wrong = std::count_if(table.rows().begin(), table.rows().end(),
                                     [](const Row& row) { return row.verdict == Verdict::Wrong; });
    const auto skipped =
        std::count_if(table.rows().begin(), table.rows().end(),
                      [](const Row& row) { return row.verdict == Verdict::Skipped; });
    std::string left_out = "not covered on this device:\n";
    for (const std::string& what : tested.not_covered)
        left_out += "  " + what + "\n";
    table.say(left_out + versions(tested.info, mpi));
    std::string verdict = wrong == 0 ? "selftest good" : "selftest WRONG";
    verdict += ": " + std::to_string(table.rows().size()) + " rows, " + std::to_string(wrong) +
               " wrong, " + std::to_string(skipped) + " not run";
    table.say(verdict + printed(", %.0f s\n", seconds));
    if (options.json)
        write_file_durably(
            *options.json,
            report_of(table, tested, mpi, seconds)
                    .dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                "\n");
    return wrong == 0 ? kExitGood : kExitWrongResult;
}

} // namespace

int run_selftest(const SelftestOptions& options) {
    const auto start = Clock::now();
    const std::string fault = environment(kFaultVariable), report = environment(kReportVariable);
    const MpiInfo mpi = mpi_info(); // before Vulkan has threads
    const auto seconds = [&] {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    if (!is_launched()) {
        const Tested tested(*Device::create(device_options(options, 0)));
        Table table(stdout);
        run_here(table, options, fault);
        return finish(table, options, tested, mpi, seconds());
    }
    return in_world([&](World& world) {
        const Tested tested(*Device::create(device_options(options, world.local_rank())));
        const std::vector<Row> rows = rows_among(world, options, fault);
        int code = kExitGood;
        if (world.rank() == 0 && !report.empty()) {
            write_file_durably(report, rows_to_json(rows));
        } else if (world.rank() == 0) {
            Table table(stdout);
            add_all(table, rows);
            code = finish(table, options, tested, mpi, seconds());
        } else if (report.empty() && std::any_of(rows.begin(), rows.end(), [](const Row& row) {
                       return row.verdict == Verdict::Wrong;
                   })) {
            code = kExitWrongResult;
        }
        return code;
    });
}

} // namespace bellows
