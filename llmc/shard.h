// shard.h: llm.c's shard format and its writer, and the side file PREFIX.json that ./tokenize writes next to the shards. They are read
// by llmc/token_file.h.
// A shard is 256 int32 (magic, version, number of tokens, zeros), then the ids as uint16 or uint32; all little-endian.
#pragma once

#include <xxhash.h>

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
    i64 tokens = 0;
    std::string xxh3;  // of the whole file, in hex; "": not known
};

inline std::string hex64(uint64_t value) { return format("%016llx", (unsigned long long)value); }

// XXH3 of a file's bytes in hex, as `xxhsum -H3` prints it. Calls read(bytes) after each piece.
template <typename Function>
std::string file_xxh3(const std::string& path, Function read) {
    File file(path, "rb");
    std::vector<char> buffer(1 << 20);
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
    XXH3_64bits_reset(state.get());
    while (const size_t n = fread(buffer.data(), 1, buffer.size(), file.handle())) {
        XXH3_64bits_update(state.get(), buffer.data(), n);
        read(n);
    }
    check(!ferror(file.handle()), "cannot read '%s': %s", path.c_str(), strerror(errno));
    return hex64(XXH3_64bits_digest(state.get()));
}
inline std::string file_xxh3(const std::string& path) {
    return file_xxh3(path, [](size_t) {});
}

// Cuts a stream of ids into shards. They are written aside as PREFIX_000000.bin.tmp and appear under their names at publish(); without it
// nothing is left behind, unless it is to be taken up again.
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
        if (kept_) { return; }
        for (size_t i = 0; i < shards_.size(); i++) { unlink(aside(i).c_str()); }
    }

    const std::vector<ShardInfo>& shards() const { return shards_; }

    void write(std::span<const int32_t> ids) {
        while (!ids.empty()) {
            if (file_ && shards_.back().tokens == shard_tokens_) { close_shard(); }
            if (!file_) { open_shard(); }
            const size_t room = shard_tokens_ - shards_.back().tokens;
            const std::span<const int32_t> part = ids.first(std::min({ids.size(), room, IDS_AT_ONCE}));
            if (format_.bytes_per_token == SHARD_16_BIT.bytes_per_token) {
                write_part<uint16_t>(part);
            } else {
                write_part<uint32_t>(part);
            }
            shards_.back().tokens += part.size();
            ids = ids.subspan(part.size());
        }
    }

    // What is written so far is on the disk, aside.
    void sync() {
        if (file_) { file_->sync(); }
    }
    // It stays there, whatever comes: resume(shards()) goes on from the last sync().
    void keep() { kept_ = true; }
    void discard() { kept_ = false; }
    // Takes up what keep() left: `shards` as it was then. What was written after it is thrown away.
    void resume(const std::vector<ShardInfo>& shards) {
        kept_ = true;
        for (size_t i = 0; i < shards.size(); i++) { check_left(aside(i), shards[i]); }
        shards_ = shards;
        if (shards_.empty() || !shards_.back().xxh3.empty()) { return; }
        const i64 size = file_bytes(shards_.back().tokens);
        file_ = std::make_unique<File>(aside(shards_.size() - 1), "r+b");
        check(ftruncate(fileno(file_->handle()), size) == 0 && fseeko(file_->handle(), size, SEEK_SET) == 0,
              "cannot cut '%s' to %lld bytes: %s", file_->path().c_str(), (long long)size, strerror(errno));
    }
    // Takes up a publish() that was broken off.
    void resume_publish(const std::vector<ShardInfo>& shards) {
        kept_ = true;
        for (size_t i = 0; i < shards.size(); i++) { check_left(path_exists(aside(i)) ? aside(i) : shard_path(prefix_, i), shards[i]); }
        shards_ = shards;
    }
    // By its name, without folder.
    bool has(const std::string& file) const {
        return std::any_of(shards_.begin(), shards_.end(), [&](const ShardInfo& s) { return s.file == file; });
    }

    // Ends the last shard: everything is on the disk, still aside.
    void finish() {
        if (file_) { close_shard(); }
    }
    // May be repeated after it was broken off.
    void publish() {
        finish();
        kept_ = true;
        for (size_t i = 0; i < shards_.size(); i++) {
            if (path_exists(aside(i))) { rename_file(aside(i), shard_path(prefix_, i)); }
        }
        sync_folder(parent_folder(prefix_));
    }

private:
    static constexpr size_t IDS_AT_ONCE = 1 << 16;

    std::string aside(i64 index) const { return shard_path(prefix_, index) + ASIDE_SUFFIX; }
    i64 file_bytes(i64 tokens) const { return SHARD_HEADER_BYTES + tokens * format_.bytes_per_token; }
    // An open shard (one without a checksum) may have more than was noted.
    void check_left(const std::string& path, const ShardInfo& shard) const {
        const i64 found = File(path, "rb").size(), wanted = file_bytes(shard.tokens);
        check(found == wanted || (found > wanted && shard.xxh3.empty()),
              "'%s' has %lld bytes, wanted %lld to go on\nHINT: it was changed since the run was broken off; begin anew", path.c_str(),
              (long long)found, (long long)wanted);
    }

    ShardHeader header(i64 tokens) const { return {format_.magic, format_.version, narrow<int32_t>(tokens), {}}; }

    void open_shard() {
        const i64 index = shards_.size();
        shards_.push_back({base_name(shard_path(prefix_, index)), 0, ""});
        file_ = std::make_unique<File>(aside(index), "wb");
        const ShardHeader h = header(0);  // its count is known only at the end
        file_->write(&h, sizeof h);
    }
    void close_shard() {
        check(fseeko(file_->handle(), 0, SEEK_SET) == 0, "cannot seek in '%s': %s", file_->path().c_str(), strerror(errno));
        const ShardHeader h = header(shards_.back().tokens);
        file_->write(&h, sizeof h);
        file_->sync_and_close();
        shards_.back().xxh3 = file_xxh3(file_->path());
        file_.reset();
    }
    template <typename Id>
    void write_part(std::span<const int32_t> ids) {
        Id narrowed[IDS_AT_ONCE];
        for (size_t i = 0; i < ids.size(); i++) {
            check(ids[i] >= 0 && ids[i] < vocab_, "the tokenizer gave id %d, outside its vocabulary of %lld", ids[i], (long long)vocab_);
            narrowed[i] = (Id)ids[i];
        }
        file_->write(narrowed, ids.size() * sizeof(Id));
    }

    std::string prefix_;
    i64 vocab_, shard_tokens_;
    ShardFormat format_;
    std::vector<ShardInfo> shards_;
    std::unique_ptr<File> file_;  // of the last shard, while it is open
    bool kept_ = false;
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
    int bytes_per_token = 0;        // 0: as llm.c's shards have it for this vocabulary
    bool bos = false, eos = false;  // does each document start with BOS, end with EOS?
    int bos_id = -1, eos_id = -1;
    SplitInfo train, val;
    using Json = nlohmann::ordered_json;
    Json problems = Json::object(), dropped = Json::object();  // what was skipped or repaired, what a filter left out: name -> count
    Json sources = Json::array();                              // the same counts for each input
    std::string run;                                           // hash of the inputs and of the options that shape the set
};

inline nlohmann::ordered_json split_to_json(const SplitInfo& split) {
    nlohmann::ordered_json json = {{"documents", split.documents}, {"tokens", split.tokens}, {"text_bytes", split.text_bytes}};
    json["shards"] = nlohmann::ordered_json::array();
    for (const ShardInfo& s : split.shards) { json["shards"].push_back({{"file", s.file}, {"tokens", s.tokens}, {"xxh3", s.xxh3}}); }
    return json;
}
// A shard's name as the file `path` lists it. Whoever replaces a set removes its shards: a name must not lead out of their folder.
inline std::string checked_shard_name(const std::string& name, const std::string& path) {
    check(!name.empty() && name == base_name(name),
          "'%s' lists the shard '%s', wanted a name without a folder\nHINT: it was changed; make the set again", path.c_str(), name.c_str());
    return name;
}
inline SplitInfo split_from_json(const nlohmann::ordered_json& json, const std::string& path) {
    SplitInfo split = {json.at("documents"), json.at("tokens"), json.at("text_bytes"), {}};
    for (const auto& s : json.at("shards")) {
        split.shards.push_back({checked_shard_name(s.at("file"), path), s.at("tokens"), s.value("xxh3", "")});
    }
    return split;
}

inline std::string token_set_text(const TokenSetInfo& info) {
    nlohmann::ordered_json json;
    json["format"] = TOKEN_SET_FORMAT;
    json["tokenizer"] = {{"file", info.tokenizer_file}, {"kind", info.tokenizer_kind}, {"xxh3", info.tokenizer_hash},
                         {"vocab", info.vocab},         {"bos_id", info.bos_id},       {"eos_id", info.eos_id}};
    json["documents"] = {{"start_with_bos", info.bos}, {"end_with_eos", info.eos}};
    json["bytes_per_token"] = info.bytes_per_token > 0 ? info.bytes_per_token : shard_format(info.vocab).bytes_per_token;
    json["train"] = split_to_json(info.train);
    json["val"] = split_to_json(info.val);
    json["problems"] = info.problems;
    json["dropped"] = info.dropped;
    json["sources"] = info.sources;
    json["run"] = info.run;
    return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}
inline void write_token_set_info(const std::string& path, const TokenSetInfo& info) { write_file_atomically(path, token_set_text(info)); }

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
        info.train = split_from_json(json.at("train"), path);
        info.val = split_from_json(json.at("val"), path);
        info.problems = json.at("problems");
        info.dropped = json.value("dropped", info.dropped);  // files of older programs have none of these
        info.sources = json.value("sources", info.sources);
        info.run = json.value("run", "");
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

// From this file ./tokenize --resume goes on with the set PREFIX.
inline std::string run_state_path(const std::string& prefix) { return prefix + ".resume.json"; }

// The side file that speaks of a file of tokens: of its set or of its validation part, or of the Megatron set that it is.
struct SideFile {
    std::string path;
    std::shared_ptr<const TokenSetInfo> info;
    bool is_val;
    ShardInfo shard;  // what it says of this file
    const SplitInfo& split() const { return is_val ? info->val : info->train; }
};

// read_token_set_info, of the file that was last asked for without reading it again: all shards of a set, maybe thousands, have one.
inline std::shared_ptr<const TokenSetInfo> read_token_set_info_once(const std::string& path) {
    struct Last {
        std::string path;
        struct stat st;
        std::shared_ptr<const TokenSetInfo> info;
    };
    thread_local Last last = {};
    struct stat st = {};
    if (stat(path.c_str(), &st) != 0) { return nullptr; }
    const auto same = [](const struct stat& a, const struct stat& b) {
        return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec &&
               a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
    };
    if (path != last.path || !same(st, last.st)) {
        std::optional<TokenSetInfo> info = read_token_set_info(path);
        last = {path, st, info ? std::make_shared<const TokenSetInfo>(std::move(*info)) : nullptr};
    }
    return last.info;
}

inline std::optional<SideFile> find_side_file(const std::string& shard) {
    const std::string prefix = shard_prefix(shard), name = base_name(shard);
    std::vector<std::string> candidates;
    if (!prefix.empty()) { candidates.push_back(prefix + ".json"); }
    if (prefix.ends_with(VAL_SUFFIX)) { candidates.push_back(prefix.substr(0, prefix.size() - strlen(VAL_SUFFIX)) + ".json"); }
    if (shard.ends_with(".bin")) { candidates.push_back(shard.substr(0, shard.size() - strlen(".bin")) + ".json"); }
    for (const std::string& path : candidates) {
        const std::shared_ptr<const TokenSetInfo> info = read_token_set_info_once(path);
        if (!info) { continue; }
        for (const bool is_val : {false, true}) {
            for (const ShardInfo& s : (is_val ? info->val : info->train).shards) {
                if (s.file == name) { return SideFile{path, info, is_val, s}; }
            }
        }
    }
    return {};
}
// The same, if it lists the file with that many tokens: otherwise it is about an older one of this name.
inline std::optional<SideFile> find_side_file(const std::string& shard, i64 tokens) {
    std::optional<SideFile> side = find_side_file(shard);
    return side && side->shard.tokens == tokens ? side : std::nullopt;
}
