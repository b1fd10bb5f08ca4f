//! How UCX is begun: with settings that it knows, and whose values it can read. By itself it logs what it does not know, and goes on.

use std::sync::Arc;

use kvx_core::{Error, Result};

use crate::config::Options;
use crate::error::{BACKEND, missing, refused};
use crate::guard;
use crate::reach;
use crate::sys::{Context, Failure, Library, Status, Worker, load};

/// The library and what it finds, with these options.
pub(crate) fn context(options: &Options) -> Result<Context> {
    let _alone = guard::check()?;
    let library = load(options.lib.as_deref()).map_err(|error| missing("open", &error))?;
    let told = options.told();
    let context = begin(library, options, &told)?;
    let copying = options.copying();
    if copying.is_empty() || !library.is_fragile() || !reach::is_over_tcp_alone(&context.resources()) {
        return Ok(context);
    }
    drop(context);
    begin(library, options, &[told, copying].concat())
}

fn begin(library: &'static Library, options: &Options, told: &[(String, String)]) -> Result<Context> {
    Context::new(library, told, &options.preferred()).map_err(|failure| match failure.call {
        "ucp_config_modify" => match (failure.status, failure.said.as_slice()) {
            // 1.20 and later say so of a name that they do not know, too, but log nothing then.
            (Status::INVALID_PARAM, [setting, said, ..]) => unread(library, setting, Some(said)),
            (Status::INVALID_PARAM, [setting]) => unknown(library, setting.split('=').next().unwrap_or(setting)),
            (_, said) => unknown(library, said.first().map_or("", String::as_str)),
        },
        _ => unread_variable(library, &failure.said).unwrap_or_else(|| begins_not(library, options, &failure)),
    })
}

/// The variable whose value UCX has said that it cannot read.
fn unread_variable(library: &Library, said: &[impl AsRef<str>]) -> Option<Error> {
    let named = |name: &str| said.iter().map(AsRef::as_ref).find(|line| is_unread(line, name.strip_prefix("UCX_").unwrap_or("")));
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).find_map(|(name, value)| {
        let line = named(&name)?;
        Some(unread(library, &format!("{name}={value}"), Some(line)))
    })
}

/// A worker. Settings that UCX does not know, or whose values it cannot read, are refused.
pub(crate) fn worker(context: &Arc<Context>, options: &Options) -> Result<Worker> {
    let library = context.library();
    let _alone = guard::check()?;
    let worker = Worker::new(context).map_err(|failure| {
        let said: Vec<&str> = context.said.lines().chain(failure.said.iter().map(String::as_str)).collect();
        wrong_setting(library, options, &said).unwrap_or_else(|| begins_not(library, options, &failure))
    })?;
    let said: Vec<&str> = context.said.lines().chain(worker.said.lines()).collect();
    match wrong_setting(library, options, &said) {
        Some(error) => Err(error),
        None => reach::check(context, options, &said).map(|()| worker),
    }
}

/// Passes on what UCX said, where nothing came of it. That it does not take what is only preferred is nobody's business.
pub(crate) fn warn(context: &Context, worker: &Worker, options: &Options) {
    let preferred = options.preferred();
    for said in [&context.said, &worker.said] {
        said.tell_but(|line| preferred.iter().any(|(name, _)| is_unknown(line, name)));
    }
}

/// The setting of which UCX has said that it does not know it, or cannot read its value.
fn wrong_setting(library: &Library, options: &Options, said: &[&str]) -> Option<Error> {
    if let Some((name, _)) = options.settings.iter().find(|(name, _)| said.iter().any(|line| is_unknown(line, name))) {
        return Some(unknown(library, name));
    }
    let own = options.settings.iter().find_map(|(name, value)| {
        let line = said.iter().find(|line| is_unread(line, name))?;
        Some(unread(library, &format!("{name}={value}"), Some(line)))
    });
    own.or_else(|| unread_variable(library, said))
}

/// A setting that UCX does not take.
fn unknown(library: &Library, setting: &str) -> Error {
    Error::config("open", format!("UCX does not take the setting {setting}"))
        .with_backend(BACKEND)
        .with_context("version", library.version_text())
        .with_remedy(
            "ucx_info -cf lists all settings, to be named without UCX_; some that an old version does not take in this way it takes from \
             the environment: UCX_NAME=value",
        )
}

/// A setting whose value UCX cannot read.
fn unread(library: &Library, setting: &str, said: Option<&str>) -> Error {
    let error = Error::config("open", format!("UCX cannot read the setting {setting}"))
        .with_backend(BACKEND)
        .with_context("version", library.version_text());
    let error = match said {
        Some(line) => error.with_context("said", line),
        None => error,
    };
    error.with_remedy("ucx_info -cf says what values each setting takes")
}

/// Whether a line says that UCX does not know a setting.
fn is_unknown(line: &str, name: &str) -> bool {
    let marks = [format!(": {name}="), format!(" {name}="), format!("UCX_{name}=")];
    (line.contains("invalid configuration") || line.contains("unused")) && marks.iter().any(|mark| line.contains(mark))
}

/// Whether a line says that UCX cannot read the value of a setting, which it names without its prefix: `TX_SEG_SIZE` of
/// `TCP_TX_SEG_SIZE`. It goes on with a value of its own.
fn is_unread(line: &str, name: &str) -> bool {
    let of = line.strip_prefix("Invalid value for ").and_then(|rest| rest.split_once(':'));
    of.and_then(|(of, _)| name.strip_suffix(of)).is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('_'))
}

/// UCX does not begin. Whose fault it is is known where it has not found what it was told to use.
fn begins_not(library: &Library, options: &Options, failure: &Failure) -> Error {
    let variables = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    refused(library, failure).with_remedy(remedy(options, variables, &failure.said))
}

fn remedy(options: &Options, variables: impl Iterator<Item = String>, said: &[String]) -> String {
    let own = options.settings.iter().map(|(name, value)| format!("ucx.{name}={value}"));
    let variables = variables.filter(|name| name.starts_with("UCX_") && !name.starts_with("UCX_LOG_"));
    let told: Vec<String> = own.chain(variables).collect();
    let absent = said.iter().any(|line| line.contains(" is not available, please use one or more of"));
    let see_whether = || format!("see whether this host can do as UCX was told: {}", told.join(", "));
    match (absent, told.is_empty()) {
        (true, true) => ABSENT.to_owned(),
        // It may be absent because of what UCX was told.
        (true, false) => format!("{ABSENT}; or {}", see_whether()),
        (false, true) => "UCX says more with UCX_LOG_LEVEL=info".to_owned(),
        (false, false) => see_whether(),
    }
}

/// Where what UCX was told to use is not there.
const ABSENT: &str = "use one that there is: docs/ucx.md says what tls and devices may name";

#[cfg(test)]
mod tests {
    use super::{ABSENT, is_unread, remedy};
    use crate::config::Options;

    #[test]
    fn a_value_that_cannot_be_read_is_known_by_the_end_of_its_name() {
        let line = "Invalid value for TX_SEG_SIZE: 'x'. Expected: memory units";
        assert!(is_unread(line, "TCP_TX_SEG_SIZE") && is_unread(line, "TX_SEG_SIZE"));
        assert!(!is_unread(line, "TCP_RX_SEG_SIZE") && !is_unread(line, "SEG_SIZE") && !is_unread(line, "RTX_SEG_SIZE"));
        assert!(!is_unread("an unused TX_SEG_SIZE: x", "TCP_TX_SEG_SIZE"));
    }

    #[test]
    fn where_ucx_does_not_begin_what_it_was_told_is_named() {
        let options = |text: &str| Options::read(&text.parse().unwrap()).unwrap();
        let advice = |text: &str, variables: &[&str], said: &str| {
            remedy(&options(text), variables.iter().map(|name| (*name).to_owned()), &[said.to_owned()])
        };
        let missing = "network device 'eth9' is not available, please use one or more of: 'lo'(tcp)";
        assert_eq!(advice("devices=eth9", &["UCX_LOG_LEVEL"], missing), ABSENT);
        let both = advice("devices=eth9,ucx.TCP_MAX_POLL=1", &["UCX_TLS"], missing);
        assert!(both.starts_with(ABSENT) && both.ends_with(": ucx.TCP_MAX_POLL=1, UCX_TLS"), "{both}");
        let small = "AM Zcopy context (160) must be <= TX segment size (15)";
        let told = advice("tls=tcp,ucx.TCP_TX_SEG_SIZE=10", &["HOME", "UCX_LOG_LEVEL", "UCX_TCP_MAX_POLL"], small);
        assert!(told.ends_with(": ucx.TCP_TX_SEG_SIZE=10, UCX_TCP_MAX_POLL"), "{told}");
        assert!(advice("tls=tcp", &["HOME"], small).contains("UCX_LOG_LEVEL=info"));
    }
}
