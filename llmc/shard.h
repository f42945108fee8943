// shard.h: llm.c's shard format and its writer, and the side file PREFIX.json that ./tokenize writes next to the shards. They are read
// by llmc/token_file.h.
// A shard is 256 int32 (magic, version, number of tokens, zeros), then the ids as uint16 or uint32; all little-endian.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <span>

#include "llmc/base.h"

static_assert(std::endian::native == std::endian::little, "shards are read as they lie on disk, which is little-endian");

struct ShardHeader {
    int32_t magic, version, tokens;
    int32_t zero[253];
};
constexpr i64 SHARD_HEADER_BYTES = 1024;
static_assert(sizeof(ShardHeader) == SHARD_HEADER_BYTES);

struct ShardFormat {
    int32_t magic, version;
    int bytes_per_token;
};
constexpr ShardFormat SHARD_16_BIT = {20240520, 1, 2};  // llm.c's "gpt-2"
constexpr ShardFormat SHARD_32_BIT = {20240801, 7, 4};  // llm.c's "llama-3"

constexpr i64 SHARD_MAX_TOKENS = std::numeric_limits<int32_t>::max();  // the header counts in int32
constexpr i64 SHARD_16_BIT_MAX_VOCAB = 65536;

inline ShardFormat shard_format(i64 vocab) { return vocab <= SHARD_16_BIT_MAX_VOCAB ? SHARD_16_BIT : SHARD_32_BIT; }

// ---------------------------------------------------------------------------------------------------------------
// Writing.

// The name of shard `index` of a set: PREFIX_000000.bin and so on.
inline std::string shard_path(const std::string& prefix, i64 index) { return format("%s_%06lld.bin", prefix.c_str(), (long long)index); }

struct ShardInfo {
    std::string file;  // without its folder, so that a set can be moved
    i64 tokens;
};

// Cuts a stream of ids into shards. They are written aside as PREFIX_000000.bin.tmp and appear under their names at publish(); without it
// nothing is left behind.
class ShardWriter {
public:
    ShardWriter(const std::string& prefix, i64 vocab, i64 shard_tokens)
        : prefix_(prefix), vocab_(vocab), shard_tokens_(shard_tokens), format_(shard_format(vocab)) {
        check(shard_tokens >= 1 && shard_tokens <= SHARD_MAX_TOKENS, "shards of %lld tokens: wanted 1 to %lld", (long long)shard_tokens,
              (long long)SHARD_MAX_TOKENS);
    }
    ShardWriter(const ShardWriter&) = delete;
    ShardWriter& operator=(const ShardWriter&) = delete;
    ~ShardWriter() {
        if (published_) { return; }
        for (size_t i = 0; i < shards_.size(); i++) { unlink(aside(i).c_str()); }
    }

    const std::vector<ShardInfo>& shards() const { return shards_; }

    void write(std::span<const int32_t> ids) {
        while (!ids.empty()) {
            if (file_ && shards_.back().tokens == shard_tokens_) { close_shard(); }
            if (!file_) { open_shard(); }
            const std::span<const int32_t> part = ids.first(std::min<size_t>(ids.size(), shard_tokens_ - shards_.back().tokens));
            if (format_.bytes_per_token == SHARD_16_BIT.bytes_per_token) {
                write_part<uint16_t>(part);
            } else {
                write_part<uint32_t>(part);
            }
            shards_.back().tokens += part.size();
            ids = ids.subspan(part.size());
        }
    }

    // Ends the last shard: everything is on the disk, still aside.
    void finish() {
        if (file_) { close_shard(); }
    }
    void publish() {
        finish();
        published_ = true;
        for (size_t i = 0; i < shards_.size(); i++) { rename_file(aside(i), shard_path(prefix_, i)); }
        sync_folder(parent_folder(prefix_));
    }

private:
    std::string aside(i64 index) const { return shard_path(prefix_, index) + ".tmp"; }

    ShardHeader header(i64 tokens) const { return {format_.magic, format_.version, narrow<int32_t>(tokens), {}}; }

    void open_shard() {
        const i64 index = shards_.size();
        shards_.push_back({base_name(shard_path(prefix_, index)), 0});
        file_ = std::make_unique<File>(aside(index), "wb");
        const ShardHeader h = header(0);  // its count is known only at the end
        file_->write(&h, sizeof h);
    }
    void close_shard() {
        check(fseeko(file_->handle(), 0, SEEK_SET) == 0, "cannot seek in '%s': %s", file_->path().c_str(), strerror(errno));
        const ShardHeader h = header(shards_.back().tokens);
        file_->write(&h, sizeof h);
        file_->sync_and_close();
        file_.reset();
    }
    template <typename Id>
    void write_part(std::span<const int32_t> ids) {
        std::vector<Id> narrowed(ids.size());
        for (size_t i = 0; i < ids.size(); i++) {
            check(ids[i] >= 0 && ids[i] < vocab_, "the tokenizer gave id %d, outside its vocabulary of %lld", ids[i], (long long)vocab_);
            narrowed[i] = (Id)ids[i];
        }
        file_->write(narrowed.data(), narrowed.size() * sizeof(Id));
    }

    std::string prefix_;
    i64 vocab_, shard_tokens_;
    ShardFormat format_;
    std::unique_ptr<File> file_;
    std::vector<ShardInfo> shards_;
    bool published_ = false;
};

// ---------------------------------------------------------------------------------------------------------------
// The side file PREFIX.json: what the shards themselves cannot say.

constexpr char TOKEN_SET_FORMAT[] = "token-set-1";

struct SplitInfo {
    i64 documents = 0, tokens = 0, text_bytes = 0;
    std::vector<ShardInfo> shards;
};
struct TokenSetInfo {
    std::string tokenizer_file, tokenizer_kind, tokenizer_hash;
    i64 vocab = 0;
    bool bos = false, eos = false;  // does each document start with BOS, end with EOS?
    int bos_id = -1, eos_id = -1;
    SplitInfo train, val;
    nlohmann::ordered_json problems = nlohmann::ordered_json::object();  // what tokenizing skipped or repaired: name -> count
};

inline nlohmann::ordered_json split_to_json(const SplitInfo& split) {
    nlohmann::ordered_json json = {{"documents", split.documents}, {"tokens", split.tokens}, {"text_bytes", split.text_bytes}};
    json["shards"] = nlohmann::ordered_json::array();
    for (const ShardInfo& s : split.shards) { json["shards"].push_back({{"file", s.file}, {"tokens", s.tokens}}); }
    return json;
}
inline SplitInfo split_from_json(const nlohmann::ordered_json& json) {
    SplitInfo split = {json.at("documents"), json.at("tokens"), json.at("text_bytes"), {}};
    for (const auto& s : json.at("shards")) { split.shards.push_back({s.at("file"), s.at("tokens")}); }
    return split;
}

inline void write_token_set_info(const std::string& path, const TokenSetInfo& info) {
    nlohmann::ordered_json json;
    json["format"] = TOKEN_SET_FORMAT;
    json["tokenizer"] = {{"file", info.tokenizer_file}, {"kind", info.tokenizer_kind}, {"xxh3", info.tokenizer_hash},
                         {"vocab", info.vocab},         {"bos_id", info.bos_id},       {"eos_id", info.eos_id}};
    json["documents"] = {{"start_with_bos", info.bos}, {"end_with_eos", info.eos}};
    json["bytes_per_token"] = shard_format(info.vocab).bytes_per_token;
    json["train"] = split_to_json(info.train);
    json["val"] = split_to_json(info.val);
    json["problems"] = info.problems;
    write_file_atomically(path, json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

// Nothing if there is no such file, or if it is somebody else's JSON.
inline std::optional<TokenSetInfo> read_token_set_info(const std::string& path) {
    if (!is_regular_file(path)) { return {}; }
    const auto json = nlohmann::ordered_json::parse(read_text_file(path), nullptr, false);
    if (!json.is_object() || json.value("format", nlohmann::ordered_json()) != TOKEN_SET_FORMAT) { return {}; }
    TokenSetInfo info;
    try {
        const auto &tokenizer = json.at("tokenizer"), &documents = json.at("documents");
        info.tokenizer_file = tokenizer.at("file");
        info.tokenizer_kind = tokenizer.at("kind");
        info.tokenizer_hash = tokenizer.at("xxh3");
        info.vocab = tokenizer.at("vocab");
        info.bos_id = tokenizer.at("bos_id");
        info.eos_id = tokenizer.at("eos_id");
        info.bos = documents.at("start_with_bos");
        info.eos = documents.at("end_with_eos");
        info.train = split_from_json(json.at("train"));
        info.val = split_from_json(json.at("val"));
        info.problems = json.at("problems");
    } catch (const nlohmann::json::exception& e) {
        die("'%s' is not what ./tokenize writes: %s\nHINT: tokenize again, or delete the file to train without it", path.c_str(), e.what());
    }
    return info;
}

// PREFIX of a shard PREFIX_000000.bin, "" if the name is of another kind.
inline std::string shard_prefix(const std::string& path) {
    const size_t underscore = path.rfind('_');
    if (underscore == std::string::npos || !path.ends_with(".bin")) { return ""; }
    const std::string number = path.substr(underscore + 1, path.size() - underscore - 5);
    return number.size() >= 6 && number.find_first_not_of("0123456789") == std::string::npos ? path.substr(0, underscore) : "";
}

constexpr char VAL_SUFFIX[] = "_val";  // validation shards of PREFIX are PREFIX_val_000000.bin ...

// The side file that belongs to a shard (of the set or of its validation part), and which of its splits lists that shard
// with that many tokens (another number: it is about an older shard of this name).
struct SideFile {
    std::string path;
    TokenSetInfo info;
    bool is_val;
    const SplitInfo& split() const { return is_val ? info.val : info.train; }
};
inline std::optional<SideFile> find_side_file(const std::string& shard, i64 tokens) {
    const std::string prefix = shard_prefix(shard);
    std::vector<std::string> candidates;
    if (!prefix.empty()) { candidates.push_back(prefix + ".json"); }
    if (prefix.ends_with(VAL_SUFFIX)) { candidates.push_back(prefix.substr(0, prefix.size() - strlen(VAL_SUFFIX)) + ".json"); }
    for (const std::string& path : candidates) {
        const std::optional<TokenSetInfo> info = read_token_set_info(path);
        if (!info) { continue; }
        for (const bool is_val : {false, true}) {
            for (const ShardInfo& s : (is_val ? info->val : info->train).shards) {
                if (s.file == base_name(shard) && s.tokens == tokens) { return SideFile{path, *info, is_val}; }
            }
        }
    }
    return {};
}
