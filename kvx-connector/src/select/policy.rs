//! What may be chosen.

use kvx_core::backend::PeerInfo;
use kvx_core::config::BackendConfig;
use kvx_core::{Error, Result};

use super::choice::ChoiceReason;
use super::list;

/// Names a backend, when the program does not.
pub(super) const NAME: &str = "KVX_BACKEND";
/// Options for the backend that was named: `name=value,name=value`.
pub(super) const OPTIONS: &str = "KVX_BACKEND_OPTIONS";

/// What may be chosen. The default leaves everything to the ranks.
///
/// "RDMA or fail" is a policy: `allow` says which backends may be taken, `transports` what a connection may run over, which
/// is known only once there is one ([`check_transport`](Self::check_transport)).
///
/// ```
/// use kvx_connector::Policy;
/// use kvx_core::backend::PeerInfo;
///
/// let rdma_or_fail = Policy {
///     allow: Some(vec!["verbs".into(), "ucx".into()]),
///     transports: Some(vec!["rc_*".into(), "dc_*".into()]),
///     ..Policy::default()
/// };
/// assert!(rdma_or_fail.check_transport(&PeerInfo::new("rc_mlx5")).is_ok());
/// assert!(rdma_or_fail.check_transport(&PeerInfo::new("tcp")).is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// The backend that the program names.
    pub name: Option<String>,
    /// The backend that `KVX_BACKEND` names: counts when `name` says nothing.
    pub environment: Option<String>,
    /// Options for the backend that is named. With these, one must be.
    pub options: BackendConfig,
    /// The only backends that may be chosen, by whatever way. `None` allows all.
    pub allow: Option<Vec<String>>,
    /// The only transports that a connection may use; a `*` at the end stands for any rest. `None` allows all.
    pub transports: Option<Vec<String>>,
}

impl Policy {
    /// What the environment says: `KVX_BACKEND`, and `KVX_BACKEND_OPTIONS` for it. An empty variable is as good as none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config) when a variable is not Unicode, the options are not `name=value,name=value`, or
    /// there are options but no backend for which they are.
    pub fn from_env() -> Result<Self> {
        Self::of(variable(NAME)?, variable(OPTIONS)?.as_deref())
    }

    /// What variables of this content say.
    pub(super) fn of(name: Option<String>, options: Option<&str>) -> Result<Self> {
        let read = |text| BackendConfig::read_from(OPTIONS, text);
        let options = options.map_or_else(|| Ok(BackendConfig::new()), read)?;
        if name.is_none() && options.origin().is_some() {
            let whose = format!("{OPTIONS} is set, and {NAME} does not say for which backend");
            return Err(Error::config("policy", whose).with_remedy(format!(
                "set {NAME} beside {OPTIONS}, or give the options where you name the backend"
            )));
        }
        Ok(Self { environment: name, options, ..Self::default() })
    }

    /// The same policy, with a backend that the program names, if it does. Options of the environment are for the backend that the
    /// environment names: for another one they do not count.
    #[must_use]
    pub fn with_name(mut self, name: Option<impl Into<String>>) -> Self {
        self.name = name.map(Into::into);
        let another = self.name.is_some() && self.name != self.environment;
        if another && self.options.origin() == Some(OPTIONS) {
            self.options = BackendConfig::new();
        }
        self
    }

    /// The same policy, with what a person has written: `NAME`, or `NAME,OPTION=VALUE,...`. Without options, those of the environment
    /// count if it names the same backend. `origin` is where it was written, for messages.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config), as for [`BackendConfig::read_from`].
    pub fn with_text(self, origin: &'static str, text: &str) -> Result<Self> {
        let (name, options) = match text.split_once(',') {
            Some((name, options)) => (name, Some(options)),
            None => (text, None),
        };
        let mut policy = self.with_name(Some(name.trim()));
        if let Some(options) = options {
            policy.options = BackendConfig::read_from(origin, options)?;
        }
        Ok(policy)
    }

    /// Whether a connection may run over what it runs over.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](kvx_core::ErrorKind::Unsupported), naming the transport and those allowed.
    pub fn check_transport(&self, info: &PeerInfo) -> Result<()> {
        let Some(allowed) = &self.transports else { return Ok(()) };
        let fits = |pattern: &String| match pattern.strip_suffix('*') {
            Some(start) => info.transport.starts_with(start),
            None => info.transport == *pattern,
        };
        if allowed.iter().any(fits) {
            return Ok(());
        }
        Err(Error::unsupported("choose", "the policy does not allow this transport")
            .with_context("transport", &info.transport)
            .with_context("allowed", list(allowed))
            .with_remedy("allow it, or find out why the fabric chose it: kvx backends"))
    }

    /// The name that counts, and who gave it.
    pub(super) fn named(&self) -> Option<(&str, ChoiceReason)> {
        match (&self.name, &self.environment) {
            (Some(name), _) => Some((name, ChoiceReason::Named)),
            (None, Some(name)) => Some((name, ChoiceReason::Environment)),
            (None, None) => None,
        }
    }

    pub(super) fn allows(&self, name: &str) -> bool {
        self.allow.as_ref().is_none_or(|allowed| allowed.iter().any(|known| known == name))
    }
}

fn variable(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => {
            Err(Error::config("policy", format!("{name} is not Unicode")).with_source(error))
        }
    }
}
