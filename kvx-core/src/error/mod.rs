//! One error type for the whole of kvx.
//!
//! An [`Error`] answers three questions: *who is to blame* ([`ErrorKind`]), *what may be done about it*
//! ([`Retry`] and, where one is known, a remedy in words), and *where it happened* (operation, backend, the native
//! code of a library, and context as key and value pairs). A refusal because two sides disagree also carries a
//! [`Mismatch`]: the field, and both values.
//!
//! A full queue is not an error: it is [`Submit::Full`](crate::backend::Submit::Full).

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

mod limits;
#[cfg(test)]
mod tests;

pub use limits::limit_remedy;

/// Shorthand for a result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Who is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller broke a rule of the API: order, range or dependency of its arguments. Never caused by what a peer
    /// sent.
    Misuse,
    /// The peer sent something wrong, or is gone.
    Peer,
    /// The fabric failed: a link, a device, a library call.
    Fabric,
    /// Something ran out: memory, descriptors, a quota.
    Resources,
    /// What was asked for cannot be done by this build, this backend or this pair of layouts.
    Unsupported,
    /// A configuration value is missing or wrong, or two engines were configured differently.
    Config,
    /// The object was closed, or the operation was cancelled.
    Closed,
    /// A bug in kvx. Please report it.
    Internal,
}

impl ErrorKind {
    /// Lower-case name, as it appears in messages and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Misuse => "misuse",
            Self::Peer => "peer",
            Self::Fabric => "fabric",
            Self::Resources => "resources",
            Self::Unsupported => "unsupported",
            Self::Config => "config",
            Self::Closed => "closed",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a caller may do after an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Retry {
    /// Trying again cannot help.
    #[default]
    Never,
    /// The same call may work later; wait, and wait longer each time.
    Backoff,
    /// The connection to this peer is lost; connect again, then repeat the call.
    Reconnect,
}

/// Two sides disagree about one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The field, for example `dtype` or `kv_heads`.
    pub field: Cow<'static, str>,
    /// Whose value [`left`](Self::left) is, and the value.
    pub left: (Cow<'static, str>, String),
    /// Whose value [`right`](Self::right) is, and the value.
    pub right: (Cow<'static, str>, String),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (left, right) = (&self.left, &self.right);
        write!(f, "{}: {} has {}, {} has {}", self.field, left.0, left.1, right.0, right.1)
    }
}

/// An error of kvx. See the [module documentation](self).
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    retry: Retry,
    operation: &'static str,
    message: Cow<'static, str>,
    backend: Option<Cow<'static, str>>,
    native: Option<i64>,
    mismatch: Option<Mismatch>,
    remedy: Option<Cow<'static, str>>,
    /// The remedy is about the limit that was met.
    limit_named: bool,
    context: Vec<(&'static str, String)>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// A new error of `kind`, raised by `operation` (a short name such as `register` or `plan.compile`).
    #[must_use]
    pub fn new(
        kind: ErrorKind,
        operation: &'static str,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self(Box::new(Inner {
            kind,
            retry: Retry::Never,
            operation,
            message: message.into(),
            backend: None,
            native: None,
            mismatch: None,
            remedy: None,
            limit_named: false,
            context: Vec::new(),
            source: None,
        }))
    }

    /// A [`ErrorKind::Misuse`] error.
    #[must_use]
    pub fn misuse(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Misuse, operation, message)
    }

    /// A [`ErrorKind::Unsupported`] error.
    #[must_use]
    pub fn unsupported(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, operation, message)
    }

    /// A [`ErrorKind::Config`] error.
    #[must_use]
    pub fn config(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Config, operation, message)
    }

    /// A [`ErrorKind::Peer`] error.
    #[must_use]
    pub fn peer(operation: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Peer, operation, message)
    }

    /// A refusal because `producer` and `consumer` differ in `field`. The message names the field and both values.
    #[must_use]
    pub fn mismatch(
        operation: &'static str,
        field: impl Into<Cow<'static, str>>,
        producer: impl fmt::Display,
        consumer: impl fmt::Display,
    ) -> Self {
        Self::mismatch_between(operation, field, ("producer", producer), ("consumer", consumer))
    }

    /// Like [`Error::mismatch`], where the two sides have other names.
    #[must_use]
    pub fn mismatch_between(
        operation: &'static str,
        field: impl Into<Cow<'static, str>>,
        left: (&'static str, impl fmt::Display),
        right: (&'static str, impl fmt::Display),
    ) -> Self {
        let mismatch = Mismatch {
            field: field.into(),
            left: (left.0.into(), left.1.to_string()),
            right: (right.0.into(), right.1.to_string()),
        };
        let mut error = Self::new(ErrorKind::Unsupported, operation, mismatch.to_string());
        error.0.mismatch = Some(mismatch);
        error
    }

    /// Sets the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Sets the advice on trying again.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.0.retry = retry;
        self
    }

    /// Names the backend in which the error arose.
    #[must_use]
    pub fn with_backend(mut self, backend: impl Into<Cow<'static, str>>) -> Self {
        self.0.backend = Some(backend.into());
        self
    }

    /// Keeps the code that a native library or the operating system gave.
    #[must_use]
    pub fn with_native(mut self, code: i64) -> Self {
        self.0.native = Some(code);
        self
    }

    /// Says what a person can do about it.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Says which limit of the system was met, and how to raise it: that comes before any other remedy.
    #[must_use]
    pub(crate) fn with_limit(mut self, remedy: String) -> Self {
        self.0.limit_named = true;
        self.with_remedy(remedy)
    }

    /// Adds one fact about where it happened, unless it is there.
    #[must_use]
    pub fn with_context(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        let fact = (key, value.to_string());
        if !self.0.context.contains(&fact) {
            self.0.context.push(fact);
        }
        self
    }

    /// Keeps the error that caused this one.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Who is to blame.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What may be done.
    #[must_use]
    pub fn retry(&self) -> Retry {
        self.0.retry
    }

    /// The operation that failed.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What went wrong, without operation, context or remedy.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The backend in which it arose, if it was one.
    #[must_use]
    pub fn backend(&self) -> Option<&str> {
        self.0.backend.as_deref()
    }

    /// The code of a native library or the operating system, if there was one.
    #[must_use]
    pub fn native(&self) -> Option<i64> {
        self.0.native
    }

    /// The field on which two sides disagree, if that is what went wrong.
    #[must_use]
    pub fn as_mismatch(&self) -> Option<&Mismatch> {
        self.0.mismatch.as_ref()
    }

    /// What a person can do about it, if that is known. Where a limit of the system is the cause, whatever was tried, it is that
    /// limit.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        let own = self.0.remedy.as_deref();
        if self.0.limit_named { own } else { self.limit().or(own) }
    }

    fn limit(&self) -> Option<&'static str> {
        let mut cause = std::error::Error::source(self);
        while let Some(inner) = cause {
            let number =
                inner.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
            if let Some(remedy) = number.and_then(limit_remedy) {
                return Some(remedy);
            }
            cause = inner.source();
        }
        None
    }

    /// This error once more, for somebody else who is to hear of it: causes are kept as text.
    #[must_use]
    pub fn again(&self) -> Self {
        let inner = &*self.0;
        let first = std::error::Error::source(self);
        let causes = std::iter::successors(first, |cause| cause.source());
        let causes = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        let causes = Some(causes).filter(|causes| !causes.is_empty()).map(Into::into);
        Self(Box::new(Inner {
            kind: inner.kind,
            retry: inner.retry,
            operation: inner.operation,
            message: inner.message.clone(),
            backend: inner.backend.clone(),
            native: inner.native,
            mismatch: inner.mismatch.clone(),
            remedy: self.remedy().map(|remedy| remedy.to_owned().into()),
            limit_named: true,
            context: inner.context.clone(),
            source: causes,
        }))
    }

    /// The error and its causes, in the order in which they came about, in one line. A cause that was said already, as where a
    /// message has it in its own words, is not said again.
    #[must_use]
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(inner) = cause {
            let why = inner.to_string();
            if !text.contains(&why) {
                text.push_str(": ");
                text.push_str(&why);
            }
            cause = inner.source();
        }
        text.replace('\n', " ")
    }

    /// Facts about where it happened.
    #[must_use]
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.0.context
    }
}

/// One line: operation, message, backend and native code, context, remedy.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        // A message that is another error in its own words may begin with the operation, and have the remedy.
        let named =
            inner.message.strip_prefix(inner.operation).is_some_and(|rest| rest.starts_with(": "));
        if !named {
            write!(f, "{}: ", inner.operation)?;
        }
        f.write_str(&inner.message)?;
        if let Some(backend) = &inner.backend {
            write!(f, " [backend {backend}")?;
            if let Some(code) = inner.native {
                write!(f, ", code {code}")?;
            }
            f.write_str("]")?;
        } else if let Some(code) = inner.native {
            write!(f, " [code {code}]")?;
        }
        for (i, (key, value)) in inner.context.iter().enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { " (" } else { ", " })?;
        }
        if !inner.context.is_empty() {
            f.write_str(")")?;
        }
        match self.remedy() {
            Some(remedy) if !inner.message.contains(remedy) => write!(f, "; {remedy}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
