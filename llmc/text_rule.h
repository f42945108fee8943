// text_rule.h: how the text of a model's users becomes tokens as its training text did.
#pragma once

#include <algorithm>
#include <memory>

#include "dataloader.h"
#include "json_file.h"
#include "tokenizer.h"

// What a token set says of itself, as checkpoints keep it; where there is no side file, what its first document begins with.
inline json token_rule(const DataLoader& data) {
    const auto info = data.token_set();
    if (!info) { return {{"first_id", data.first_id()}}; }
    return {{"bos", info->bos}, {"eos", info->eos}, {"tokenizer_file", info->tokenizer_file}, {"tokenizer_hash", info->tokenizer_hash}};
}
// Two sets of one model come from one tokenizer; where it is known, others are refused.
inline void check_same_tokenizer(const DataLoader& set, const json& rule, const char* flag, const std::string& value) {
    const json own = token_rule(set);
    if (!own.contains("tokenizer_hash") || !rule.contains("tokenizer_hash") || own["tokenizer_hash"] == rule["tokenizer_hash"]) { return; }
    usage_error("%s '%s' was made with the tokenizer '%s' (XXH3 %s), the training data with '%s' (XXH3 %s)\nHINT: tokenize it again with the latter", flag, value.c_str(),
                own["tokenizer_file"].get<std::string>().c_str(), own["tokenizer_hash"].get<std::string>().c_str(), rule["tokenizer_file"].get<std::string>().c_str(),
                rule["tokenizer_hash"].get<std::string>().c_str());
}

// How text becomes tokens for a model: the tokenizer, and the rule of the shards it was trained on.
struct TextRule {
    std::unique_ptr<Tokenizer> tokenizer;
    bool bos = false;   // documents began with BOS

    TextRule(const std::string& file, const json& tokens, i64 vocab) : tokenizer(load_tokenizer(file)) {
        check(tokenizer->vocab_size() <= vocab, "--tokenizer '%s' has %lld ids, but the model knows %lld\nHINT: pass the tokenizer that made the training shards",
              file.c_str(), (long long)tokenizer->vocab_size(), (long long)vocab);
        if (tokens.contains("first_id")) {
            bos = tokens.at("first_id") == tokenizer->bos_id;
        } else if (tokens.is_object()) {
            bos = tokens.at("bos").get<bool>();
            const std::string hash = tokens.at("tokenizer_hash");
            if (hash != tokenizer->hash) { usage_error("--tokenizer '%s' is not the one that made the training shards (XXH3 %s, wanted %s)", file.c_str(), tokenizer->hash.c_str(), hash.c_str()); }
        } else {
            bos = tokenizer->bos_id >= 0 && tokenizer->bos_id != tokenizer->eos_id;  // imported: Llama's habit; GPT-2's one mark only ends documents
        }
    }
    // An empty prompt still needs a token to start from: BOS, or the EOS that ended the document before.
    std::vector<int> encode(const std::string& text) const {
        std::vector<int> ids = tokenizer->encode(text);
        if (bos && tokenizer->bos_id >= 0) { ids.insert(ids.begin(), tokenizer->bos_id); }
        if (ids.empty()) { ids.push_back(tokenizer->eos_id >= 0 ? tokenizer->eos_id : tokenizer->bos_id); }
        if (ids[0] < 0) { usage_error("--prompt is empty, and the tokenizer has neither BOS nor EOS to start from"); }
        return ids;
    }
    std::vector<int> stop_tokens(bool ignore_eos) const {
        std::vector<int> stop;
        for (int id : {tokenizer->eos_id, tokenizer->bos_id}) {
            if (!ignore_eos && id >= 0) { stop.push_back(id); }
        }
        return stop;
    }
};
