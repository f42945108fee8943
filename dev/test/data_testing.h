// data_testing.h: what the tests of the data path share: a folder that vanishes, files and shards in it, failures and what they say.
// Light to compile: no simdjson, no SentencePiece.
#pragma once

#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/shard.h"

// A folder of its own for each test.
class DataTest : public testing::Test {
protected:
    void SetUp() override {
        char folder[] = "/tmp/test_data.XXXXXX";
        ASSERT_NE(mkdtemp(folder), nullptr);
        folder_ = folder;
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    std::string path(const std::string& name) const { return folder_ + "/" + name; }

    std::string write_file(const std::string& name, const std::string& content) const {
        std::filesystem::create_directories(parent_folder(path(name)));
        File file(path(name), "wb");
        file.write(content.data(), content.size());
        file.close();
        return path(name);
    }
    // One shard NAME_000000.bin with these ids.
    std::string write_shard(const std::string& name, const std::vector<int32_t>& ids, i64 vocab = 65536) const {
        std::filesystem::create_directories(parent_folder(path(name)));
        if (ids.empty()) {
            const ShardHeader header = {SHARD_16_BIT.magic, SHARD_16_BIT.version, 0, {}};
            return write_file(name + "_000000.bin", std::string((const char*)&header, sizeof header));
        }
        ShardWriter writer(path(name), vocab, SHARD_MAX_TOKENS);
        writer.write(ids);
        writer.publish();
        return shard_path(path(name), 0);
    }
    std::vector<std::string> file_names() const {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
            if (entry.is_regular_file()) { names.push_back(entry.path().filename().string()); }
        }
        std::sort(names.begin(), names.end());
        return names;
    }

    std::string folder_;
};

inline std::vector<int32_t> iota_ids(i64 n, int32_t first = 0) {
    std::vector<int32_t> ids(n);
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

// The message and exit code of what must fail, "" if it did not.
struct Failure {
    std::string message;
    int exit_code = 0;
};
template <typename Function>
Failure failure_of(Function function) {
    try {
        function();
    } catch (const Error& e) { return {e.what(), e.exit_code}; }
    return {};
}
#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "found: " << (text)

// Lowers a limit of this process for as long as it lives.
class Limit {
public:
    Limit(int resource, rlim_t value) : resource_(resource) {
        getrlimit((__rlimit_resource)resource_, &before_);
        const struct rlimit limit = {value, before_.rlim_max};
        setrlimit((__rlimit_resource)resource_, &limit);
    }
    ~Limit() { setrlimit((__rlimit_resource)resource_, &before_); }

private:
    int resource_;
    struct rlimit before_;
};

inline size_t open_files() { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); }
